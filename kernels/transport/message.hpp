#pragma once

// What every kind of link does with a message: how tensors are described, and which message may come next.

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <vector>

#include "descriptor.hpp"

namespace ds_ext {

/// A tensor to be sent: its bytes lie one after the other at `address`.
struct Piece {
    std::uint16_t dtype;
    std::vector<std::int64_t> shape;
    const unsigned char* address;
};

inline std::uint64_t aligned(std::uint64_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}
inline std::uint32_t channel_of(std::uint32_t tag) {
    return tag >> 16;
}

/// Of every tensor of a message, all but its numbers and its place.
inline std::vector<Descriptor> describe(std::uint32_t tag, const std::vector<Piece>& pieces) {
    if (pieces.empty())
        throw DescriptorError("a message needs at least one tensor; send an empty one as a mere signal");
    if (pieces.size() > kMaxTensors) throw DescriptorError("more than 65536 tensors in one message");
    std::vector<Descriptor> made(pieces.size());
    std::uint64_t end = 0;
    for (std::size_t i = 0; i < pieces.size(); ++i) {
        Descriptor& d = made[i];
        d.dtype = pieces[i].dtype;
        set_shape(d, pieces[i].shape);
        d.tag = tag;
        d.index = static_cast<std::uint32_t>(i);
        d.count = static_cast<std::uint32_t>(pieces.size());
        d.offset = end;
        d.nbytes = tensor_bytes(d);
        end = aligned(end + d.nbytes);
        if (end > kMaxBodyBytes) throw DescriptorError("the message has more than 2^62 bytes");
    }
    for (Descriptor& d : made) d.body_bytes = end;
    return made;
}

/// The sender's numbers of a link: each message gets the next of the link and of its channel.
class SequenceNumbers {
  public:
    void assign(std::vector<Descriptor>& descriptors) {
        auto& seq = seqs_[channel_of(descriptors[0].tag)];
        for (Descriptor& d : descriptors) {
            d.seq = seq;
            d.link_seq = given_;
        }
        ++seq;
        ++given_;
    }
    std::uint64_t given() const { return given_; }

  private:
    std::uint64_t given_ = 0;
    std::unordered_map<std::uint32_t, std::uint64_t> seqs_;
};

/// The receiver's: which message must come next. A DescriptorError says what does not fit, and counts nothing.
class SequenceCheck {
  public:
    /// The descriptors of one message, each checked by unpack().
    void admit(const std::vector<Descriptor>& descriptors) {
        const auto need = [](bool holds, const char* what) {
            if (!holds) throw DescriptorError(what);
        };
        const Descriptor& first = descriptors[0];
        auto& seq = seqs_[channel_of(first.tag)];
        need(first.link_seq == admitted_, "a message is missing or comes twice");
        need(first.seq == seq, "a message of the channel is missing or comes twice");
        need(first.count == descriptors.size(), "the message has another number of tensors");
        for (std::uint32_t i = 0; i < descriptors.size(); ++i) {
            const Descriptor& d = descriptors[i];
            need(d.tag == first.tag && d.count == first.count && d.link_seq == first.link_seq && d.seq == first.seq &&
                     d.body_bytes == first.body_bytes && d.place == first.place,
                 "the descriptors are not of the same message");
            need(d.index == i, "the descriptors are out of order");
        }
        ++seq;
        ++admitted_;
    }
    std::uint64_t admitted() const { return admitted_; }

  private:
    std::uint64_t admitted_ = 0;
    std::unordered_map<std::uint32_t, std::uint64_t> seqs_;
};

/// Text that a peer has given, as it may be shown: printable, and not too long.
inline constexpr std::size_t kCauseBytes = 500;
inline std::string shown(const char* text, std::size_t bytes) {
    std::string found(text, std::min(bytes, kCauseBytes));
    for (char& letter : found)
        if (static_cast<unsigned char>(letter) < 0x20 || letter == 0x7F) letter = ' ';
    return found;
}

}  // namespace ds_ext
