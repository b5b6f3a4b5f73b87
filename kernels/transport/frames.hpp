#pragma once

// What travels over a tcp connection: messages (descriptors, then the body) and control frames, one after the other.
// kernels/README.md draws them.

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
    alive = 1,  // only the count
    cause = 2,  // why the peer fails, as text
    bye = 3,    // the peer closes its transport; nothing follows
};

struct Control {
    std::uint32_t magic = 0x43585344;  // "DSXC" in memory
    std::uint16_t version = kVersion;
    std::uint16_t kind = 0;
    std::uint32_t bytes = 0;  // of the text that follows
    std::uint32_t reserved = 0;
    std::uint64_t taken = 0;  // messages that the sender of this frame has taken, ever
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
    unsigned char bytes[sizeof control];
    std::memcpy(bytes, &control, sizeof control);
    control.checksum = checksum(bytes, offsetof(Control, checksum));
    std::memcpy(bytes, &control, sizeof control);
    return std::string(reinterpret_cast<const char*>(bytes), sizeof bytes) + body;
}

/// Cuts a stream of bytes into frames. Bodies are received where they stay; everything is checked before it is used.
class FrameReader {
  public:
    class Sink {
      public:
        virtual ~Sink() = default;
        /// A whole message, whose descriptors follow the last one's.
        virtual void message(Arrival arrival) = 0;
        virtual void control(ControlKind kind, std::uint64_t taken, std::string text) = 0;
    };

    explicit FrameReader(std::shared_ptr<Pool> pool) : pool_(std::move(pool)), staging_(kStaging) {}

    /// Where the next bytes are to be put: `spaces` has room for two; returns how many there are.
    int spaces(iovec* spaces) {
        if (in_body()) {
            spaces[0] = {arrival_.address + body_here_, body_bytes() - body_here_};
            spaces[1] = {staging_.data(), staging_.size()};
            return 2;
        }
        if (begin_ > 0) {
            std::memmove(staging_.data(), staging_.data() + begin_, end_ - begin_);
            end_ -= begin_;
            begin_ = 0;
        }
        spaces[0] = {staging_.data() + end_, staging_.size() - end_};
        return 1;
    }

    /// `count` bytes were put there. DescriptorError or LinkError: the stream cannot be used any more.
    void got(std::size_t count, Sink& sink) {
        if (in_body()) {
            const std::size_t mine = std::min<std::uint64_t>(count, body_bytes() - body_here_);
            body_here_ += mine;
            begin_ = 0;
            end_ = count - mine;
            if (body_here_ < body_bytes()) return;
            finish(sink);
        } else {
            end_ += count;
        }
        while (step(sink)) {
        }
    }

  private:
    static constexpr std::size_t kStaging = 64 << 10;

    std::size_t here() const { return end_ - begin_; }
    const unsigned char* next() const { return staging_.data() + begin_; }
    bool in_body() const { return arrival_.address != nullptr; }
    std::uint64_t body_bytes() const { return arrival_.descriptors[0].body_bytes; }

    /// One descriptor or control frame of what is staged; false when more bytes are needed first.
    bool step(Sink& sink) {
        if (in_body() || here() < sizeof(Control)) return false;
        std::uint32_t magic = 0;
        std::memcpy(&magic, next(), sizeof magic);
        if (arrival_.descriptors.empty() && magic == Control{}.magic) return control(sink);
        if (magic != kMagic) throw LinkError("these bytes are no frame");
        if (here() < kDescriptorBytes) return false;
        arrival_.descriptors.push_back(unpack(next()));
        begin_ += kDescriptorBytes;
        const Descriptor& first = arrival_.descriptors[0];
        if (first.place != 0) throw DescriptorError("the message has a place in a segment");
        if (arrival_.descriptors.size() == first.count) begin_body(sink);
        return true;
    }

    bool control(Sink& sink) {
        Control control;
        std::memcpy(&control, next(), sizeof control);
        if (control.checksum != checksum(next(), offsetof(Control, checksum)))
            throw LinkError("the checksum of a control frame is wrong");
        if (control.version != kVersion) throw LinkError("a control frame of another version of ds_ext");
        if (control.bytes > kCauseBytes) throw LinkError("a control frame is too long");
        if (here() < sizeof control + control.bytes) return false;
        const unsigned char* text = next() + sizeof control;
        if (control.text_checksum != checksum(text, control.bytes))
            throw LinkError("the checksum of a control frame's text is wrong");
        begin_ += sizeof control + control.bytes;
        sink.control(static_cast<ControlKind>(control.kind), control.taken,
                     shown(reinterpret_cast<const char*>(text), control.bytes));
        return true;
    }

    /// All descriptors are here. Only a message that may come now is given memory.
    void begin_body(Sink& sink) {
        order_.admit(arrival_.descriptors);
        arrival_.memory = pool_->take(std::max<std::uint64_t>(body_bytes(), 1));
        arrival_.address = static_cast<unsigned char*>(arrival_.memory.get());
        body_here_ = std::min<std::uint64_t>(here(), body_bytes());
        std::memcpy(arrival_.address, next(), body_here_);
        begin_ += body_here_;
        if (body_here_ == body_bytes()) finish(sink);
    }

    void finish(Sink& sink) {
        sink.message(std::exchange(arrival_, {}));
        body_here_ = 0;
    }

    std::shared_ptr<Pool> pool_;
    std::vector<unsigned char> staging_;
    std::size_t begin_ = 0, end_ = 0;
    Arrival arrival_;  // under way
    std::uint64_t body_here_ = 0;
    SequenceCheck order_;
};

}  // namespace ds_ext
