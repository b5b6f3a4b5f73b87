// Fuzzer of all native parsers: random changes of valid input, for a number of seconds. A parser must throw its own
// errors or return valid results. The sanitizers detect everything else.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "frames.hpp"
#include "rdma_wire.hpp"
#include "shm_incoming.hpp"
#include "shm_outgoing.hpp"

using namespace ds_ext;

namespace {

using Bytes = std::vector<unsigned char>;
std::mt19937_64 draw;

void change(Bytes& bytes) {
    for (auto count = 1 + draw() % 4; count > 0 && !bytes.empty(); --count) {
        const auto at = draw() % bytes.size();
        switch (draw() % 5) {
            case 0:
                bytes[at] ^= static_cast<unsigned char>(1u << draw() % 8);
                break;
            case 1:
                bytes[at] = static_cast<unsigned char>(draw());
                break;
            case 2:
                bytes.resize(at);
                break;
            case 3:
                bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(at), bytes[draw() % bytes.size()]);
                break;
            case 4:
                bytes[at] = draw() % 2 ? 0xFF : 0x00;
                break;
        }
    }
}

/// Set a valid checksum, so that the checks after it are reached.
void seal(unsigned char* bytes, std::size_t checksum_at) {
    const std::uint32_t right = checksum(bytes, checksum_at);
    std::memcpy(bytes + checksum_at, &right, sizeof right);
}

Bytes message(std::uint64_t link_seq, std::uint64_t seq, std::size_t tensors) {
    std::vector<Piece> pieces;
    for (std::size_t i = 0; i < tensors; ++i)
        pieces.push_back(
            {static_cast<std::uint16_t>(draw() % 17), {static_cast<std::int64_t>(draw() % 9), 3}, nullptr});
    auto descriptors = describe(5 << 16, pieces);
    Bytes bytes(tensors * kDescriptorBytes + descriptors[0].body_bytes, 0x11);
    for (std::size_t i = 0; i < tensors; ++i) {
        descriptors[i].link_seq = link_seq;
        descriptors[i].seq = seq;
        pack(descriptors[i], bytes.data() + i * kDescriptorBytes);
    }
    return bytes;
}

void descriptor() {
    Bytes bytes = message(0, 0, 1);
    bytes.resize(kDescriptorBytes);
    change(bytes);
    bytes.resize(kDescriptorBytes);
    if (draw() % 4) seal(bytes.data(), kChecksumOffset);
    const Descriptor found = unpack(bytes.data());
    if (tensor_bytes(found) != found.nbytes || found.nbytes > found.body_bytes - found.offset) std::abort();
}

class Count final : public FrameReader::Sink {
  public:
    void message(Arrival arrival) override {
        for (const Descriptor& d : arrival.descriptors)
            for (std::uint64_t i = 0; i < d.nbytes; ++i) sum += arrival.address[d.offset + i];
    }
    void control(ControlKind, std::uint64_t, std::string text) override { sum += text.size(); }
    std::uint64_t sum = 0;
};

void frames(const std::shared_ptr<Pool>& pool) {
    Bytes stream;
    std::uint64_t sent = 0;
    for (auto count = 1 + draw() % 4; count > 0; --count) {
        Bytes next = message(sent, sent, 1 + draw() % 3);
        ++sent;
        if (draw() % 2) {
            const std::string text =
                pack_control(static_cast<ControlKind>(draw() % 5), draw(), std::string(draw() % 40, 'x'));
            next.insert(next.end(), text.begin(), text.end());
        }
        if (draw() % 3 == 0) {  // one field, with a valid checksum
            next[draw() % kChecksumOffset] ^= static_cast<unsigned char>(draw());
            seal(next.data(), kChecksumOffset);
        }
        stream.insert(stream.end(), next.begin(), next.end());
    }
    if (draw() % 4) change(stream);
    FrameReader reader(pool);
    Count sink;
    for (std::size_t at = 0; at < stream.size();) {
        iovec buffers[2];
        const int parts = reader.buffers(buffers);
        std::size_t put = 0;
        const std::size_t limit = std::min<std::size_t>(stream.size() - at, 1 + draw() % 700);
        for (int i = 0; i < parts && put < limit; ++i) {
            const std::size_t count = std::min(limit - put, buffers[i].iov_len);
            std::memcpy(buffers[i].iov_base, stream.data() + at + put, count);
            put += count;
        }
        at += put;
        reader.parse(put, sink);
    }
}

void superblock(Segment& segment, const Address& address) {
    Superblock good;
    good.source = address.source;
    good.destination = address.destination;
    Bytes bytes(sizeof good);
    std::memcpy(bytes.data(), &good, sizeof good);
    seal(bytes.data(), offsetof(Superblock, checksum));
    change(bytes);
    bytes.resize(sizeof good);
    if (draw() % 2) seal(bytes.data(), offsetof(Superblock, checksum));
    std::memcpy(segment.memory().address(), bytes.data(), bytes.size());
    Segment::attach(dup(segment.memory().descriptor()), address);
    if (std::memcmp(bytes.data(), &good, offsetof(Superblock, checksum)) != 0) {
        const auto* found = reinterpret_cast<const Superblock*>(bytes.data());
        if (found->minor == good.minor) std::abort();  // only another minor version is accepted
    }
}

/// Both endpoints of a segment with random changes of its counters and descriptors. Messages that are still taken must
/// be inside the segment, and the allocator must stay consistent.
class Shared {
  public:
    Shared() : incoming_(address_), file_(dup(incoming_.descriptor())) {
        outgoing_ = std::make_unique<ShmOutgoing>(dup(file_.number()), dup(doorbell_.descriptor()), address_, 1 << 16);
        void* at = mmap(nullptr, kSlotsOffset + kSlots, PROT_READ | PROT_WRITE, MAP_SHARED, file_.number(), 0);
        if (at == MAP_FAILED) std::abort();
        memory_ = static_cast<unsigned char*>(at);
    }
    Shared(const Shared&) = delete;
    Shared& operator=(const Shared&) = delete;
    ~Shared() { munmap(memory_, kSlotsOffset + kSlots); }

    /// Run until an endpoint throws.
    [[noreturn]] void run() {
        while (true) {
            send();
            for (auto count = draw() % 3; count > 0; --count) spoil();
            while (incoming_.has_message()) {
                const Arrival arrival = incoming_.take();
                for (const Descriptor& d : arrival.descriptors)
                    if (d.nbytes > 0) sum_ += arrival.address[d.offset] + arrival.address[d.offset + d.nbytes - 1];
                if (draw() % 4) incoming_.release(arrival);
            }
            outgoing_->in_flight();
            sum_ += incoming_.end_reason().size() + outgoing_->end_reason().size();
        }
    }

  private:
    static constexpr std::uint64_t kSlots = 1 << 20;

    void send() {
        std::vector<Piece> pieces(1 + draw() % 3, {1, {static_cast<std::int64_t>(draw() % 5000)}, data_});
        if (auto slot = outgoing_->reserve(5 << 16, pieces)) outgoing_->transmit(*slot, pieces);
    }

    /// Change a counter, or a byte of a descriptor in the ring or in a slot, with or without a valid checksum.
    void spoil() {
        const auto small = [] { return draw() % 2 ? draw() % 64 : draw(); };
        const std::uint64_t value = small();
        switch (draw() % 4) {
            case 0:
                std::memcpy(memory_ + kCountersOffset + draw() % sizeof(Counters) / 8 * 8, &value, draw() % 2 ? 4 : 8);
                break;
            case 1:
                std::memcpy(memory_ + kReturnsOffset + draw() % 64 * 8, &value, 8);
                break;
            default: {
                unsigned char* at = memory_ + (draw() % 2 ? kRingOffset + draw() % 64 * kDescriptorBytes
                                                          : kSlotsOffset + draw() % 256 * kAlignment);
                if (draw() % 2)
                    at[draw() % kChecksumOffset] ^= static_cast<unsigned char>(draw());
                else
                    std::memcpy(at + draw() % 18 * 8, &value, 8);
                if (draw() % 4) seal(at, kChecksumOffset);
            }
        }
    }

    const Address address_{0, 1, {}};
    unsigned char data_[5000] = {};
    Doorbell doorbell_ = Doorbell::create();
    ShmIncoming incoming_;
    FileDescriptor file_;
    std::unique_ptr<ShmOutgoing> outgoing_;
    unsigned char* memory_ = nullptr;
    std::uint64_t sum_ = 0;
};

void greeting(const Address& address) {
    Greeting good;
    good.source = address.source;
    good.destination = address.destination;
    good.mtu = 3;
    const std::string text = write_greeting(good);
    Bytes bytes(text.begin(), text.end());
    change(bytes);
    if (draw() % 4 && bytes.size() == kGreetingBytes) seal(bytes.data(), offsetof(Greeting, checksum));
    const Greeting found = read_greeting({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, address);
    if (found.mtu < 1 || found.mtu > 5 || found.slab_bytes > kMaxSlabBytes) std::abort();
}

void notice() {
    Notice good;
    good.kind = static_cast<NoticeKind>(draw() % 8);
    good.bytes = draw() % 2 ? 1 << 20 : draw();
    set_text(good, std::string(draw() % 300, 'x'));
    const Block made = write_notice(good);
    Bytes bytes(made.begin(), made.end());
    change(bytes);
    bytes.resize(kDescriptorBytes);
    if (draw() % 4) seal(bytes.data(), kChecksumOffset);
    Block block;
    std::memcpy(block.data(), bytes.data(), block.size());
    const Notice found = read_notice(block);
    if (found.kind == NoticeKind::abort && text_of(found).size() > found.text.size()) std::abort();
    if (found.kind == NoticeKind::receipt && found.count > found.places.size()) std::abort();
}

}  // namespace

int main(int count, char** words) {
    const double seconds = count > 1 ? std::atof(words[1]) : 10;
    const auto seed = count > 2 ? std::strtoull(words[2], nullptr, 10) : std::random_device{}();
    std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
    draw.seed(seed);
    const Address address{0, 1, {}};
    Segment segment = Segment::create(address);
    const auto pool = std::make_shared<Pool>();
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    std::uint64_t tries = 0, refused = 0;
    while (std::chrono::steady_clock::now() < end) {
        ++tries;
        try {
            if (tries % 1024 == 0)
                superblock(segment, address);  // slow: it maps the whole segment
            else if (tries % 1024 == 512)
                Shared().run();
            else if (tries % 2)
                descriptor();
            else if (tries % 8 == 2)
                greeting(address);
            else if (tries % 8 == 4)
                notice();
            else
                frames(pool);
        } catch (const DescriptorError&) {
            ++refused;
        } catch (const LinkError&) {
            ++refused;
        } catch (const std::bad_alloc&) {
            ++refused;  // a body larger than the memory of the host
        }
    }
    std::printf("%llu inputs, %llu refused\n", static_cast<unsigned long long>(tries),
                static_cast<unsigned long long>(refused));
    return refused > 0 && refused < tries ? 0 : 1;
}
