#pragma once

// Stream of a tcp connection: messages (descriptors, then the body) and control frames. kernels/README.md draws it.

#include <sys/uio.h>

#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "link.hpp"
#include "pool.hpp"

namespace ds_ext {

enum class ControlKind : std::uint16_t {
    alive = 1,  // heartbeat, and link credits
    cause = 2,  // cause of the peer's failure, as text
    bye = 3,    // the peer closes its transport; no data follow
};

struct Control {
    std::uint32_t magic = 0x43585344;  // "DSXC" in memory
    std::uint16_t version = kVersion;
    std::uint16_t kind = 0;
    std::uint32_t bytes = 0;  // of the text that follows
    std::uint32_t reserved = 0;
    std::uint64_t taken = 0;  // total messages taken by the sender of this frame
    std::uint32_t text_checksum = 0;
    std::uint32_t checksum = 0;  // CRC-32C of all bytes before it
};
static_assert(sizeof(Control) == 32 && offsetof(Control, checksum) == 28);

inline std::string pack_control(ControlKind kind, std::uint64_t taken, const std::string& text = {}) {
    Control control;
    control.kind = static_cast<std::uint16_t>(kind);
    const std::string body = text.substr(0, kCauseBytes);
    control.bytes = static_cast<std::uint32_t>(body.size());
    control.taken = taken;
    control.text_checksum = checksum(reinterpret_cast<const unsigned char*>(body.data()), body.size());
    control.checksum = checksum_of(control);
    return std::string(reinterpret_cast<const char*>(&control), sizeof control) + body;
}

/// Parser of the stream. Bodies are received directly into their final memory. All data are checked before use.
class FrameReader {
  public:
    class Sink {
      public:
        virtual ~Sink() = default;
        /// A complete message, in sequence.
        virtual void message(Arrival arrival) = 0;
        virtual void control(ControlKind kind, std::uint64_t taken, std::string text) = 0;
    };

    explicit FrameReader(std::shared_ptr<Pool> pool) : pool_(std::move(pool)), staging_(kStaging) {}

    /// Fill in one or two buffers for the next bytes. Returns their number.
    int buffers(iovec* buffers) {
        if (in_body()) {
            buffers[0] = {arrival_.address + body_received_, body_bytes() - body_received_};
            buffers[1] = {staging_.data(), staging_.size()};
            return 2;
        }
        if (begin_ > 0) {
            std::memmove(staging_.data(), staging_.data() + begin_, end_ - begin_);
            end_ -= begin_;
            begin_ = 0;
        }
        buffers[0] = {staging_.data() + end_, staging_.size() - end_};
        return 1;
    }

    /// Parse `count` bytes that were written to the buffers. After DescriptorError or LinkError the stream is invalid.
    void parse(std::size_t count, Sink& sink) {
        if (in_body()) {
            const std::size_t of_body = std::min<std::uint64_t>(count, body_bytes() - body_received_);
            body_received_ += of_body;
            begin_ = 0;
            end_ = count - of_body;
            if (body_received_ < body_bytes()) return;
            finish(sink);
        } else {
            end_ += count;
        }
        while (step(sink)) {
        }
    }

  private:
    static constexpr std::size_t kStaging = 64 << 10;

    std::size_t available() const { return end_ - begin_; }
    const unsigned char* next() const { return staging_.data() + begin_; }
    bool in_body() const { return arrival_.address != nullptr; }
    std::uint64_t body_bytes() const { return arrival_.descriptors[0].body_bytes; }

    /// Parse one descriptor or control frame. Returns false if more bytes are needed.
    bool step(Sink& sink) {
        if (in_body() || available() < sizeof(Control)) return false;
        std::uint32_t magic = 0;
        std::memcpy(&magic, next(), sizeof magic);
        if (arrival_.descriptors.empty() && magic == Control{}.magic) return control(sink);
        if (magic != kMagic) throw LinkError("wrong magic number: not a frame");
        if (available() < kDescriptorBytes) return false;
        arrival_.descriptors.push_back(unpack(next()));
        begin_ += kDescriptorBytes;
        const Descriptor& first = arrival_.descriptors[0];
        if (first.place != 0) throw DescriptorError("message with a place in a segment");
        if (arrival_.descriptors.size() == first.count) begin_body(sink);
        return true;
    }

    bool control(Sink& sink) {
        Control control;
        std::memcpy(&control, next(), sizeof control);
        const auto need = require<LinkError>;
        need(control.checksum == checksum_of(control), "wrong checksum of a control frame");
        need(control.version == kVersion, "control frame of another version of ds_ext");
        need(control.bytes <= kCauseBytes, "control frame too long");
        if (available() < sizeof control + control.bytes) return false;
        const unsigned char* text = next() + sizeof control;
        need(control.text_checksum == checksum(text, control.bytes), "wrong checksum of the text of a control frame");
        begin_ += sizeof control + control.bytes;
        sink.control(static_cast<ControlKind>(control.kind), control.taken,
                     printable(reinterpret_cast<const char*>(text), control.bytes));
        return true;
    }

    /// Start the body after the last descriptor. The sequence is checked before memory is allocated.
    void begin_body(Sink& sink) {
        order_.admit(arrival_.descriptors);
        arrival_.memory = pool_->take(std::max<std::uint64_t>(body_bytes(), 1));
        arrival_.address = static_cast<unsigned char*>(arrival_.memory.get());
        body_received_ = std::min<std::uint64_t>(available(), body_bytes());
        std::memcpy(arrival_.address, next(), body_received_);
        begin_ += body_received_;
        if (body_received_ == body_bytes()) finish(sink);
    }

    void finish(Sink& sink) {
        sink.message(std::exchange(arrival_, {}));
        body_received_ = 0;
    }

    std::shared_ptr<Pool> pool_;
    std::vector<unsigned char> staging_;
    std::size_t begin_ = 0, end_ = 0;
    Arrival arrival_;  // incomplete
    std::uint64_t body_received_ = 0;
    SequenceCheck order_;
};

}  // namespace ds_ext
