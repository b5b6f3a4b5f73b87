#pragma once

// Messages on every kind of link: description of their tensors, and sequence numbers.

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <vector>

#include "descriptor.hpp"

namespace ds_ext {

/// Contiguous tensor to send.
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

/// Return one descriptor per tensor, without sequence numbers and place.
inline std::vector<Descriptor> describe(std::uint32_t tag, const std::vector<Piece>& pieces) {
    if (pieces.empty()) throw DescriptorError("message: no tensors. Send an empty tensor as a signal");
    if (pieces.size() > kMaxTensors)
        throw DescriptorError("message: at most 65536 tensors fit (got " + std::to_string(pieces.size()) + ")");
    std::vector<Descriptor> descriptors(pieces.size());
    std::uint64_t end = 0;
    for (std::size_t i = 0; i < pieces.size(); ++i) {
        Descriptor& d = descriptors[i];
        d.dtype = pieces[i].dtype;
        set_shape(d, pieces[i].shape);
        d.tag = tag;
        d.index = static_cast<std::uint32_t>(i);
        d.count = static_cast<std::uint32_t>(pieces.size());
        d.offset = end;
        d.nbytes = tensor_bytes(d);
        end = aligned(end + d.nbytes);
        if (end > kMaxBodyBytes) throw DescriptorError("message of more than 2^62 bytes");
    }
    for (Descriptor& d : descriptors) d.body_bytes = end;
    return descriptors;
}

/// Sequence numbers at the sender of a link: one count for the link and one per channel.
class SequenceNumbers {
  public:
    void assign(std::vector<Descriptor>& descriptors) {
        auto& seq = seqs_[channel_of(descriptors[0].tag)];
        for (Descriptor& d : descriptors) {
            d.seq = seq;
            d.link_seq = assigned_;
        }
        ++seq;
        ++assigned_;
    }
    std::uint64_t assigned() const { return assigned_; }

  private:
    std::uint64_t assigned_ = 0;
    std::unordered_map<std::uint32_t, std::uint64_t> seqs_;
};

/// Check of the sequence numbers at the receiver. A message that causes a DescriptorError is not counted.
class SequenceCheck {
  public:
    /// Check the descriptors of one message, each already checked by unpack().
    void admit(const std::vector<Descriptor>& descriptors) {
        const auto need = require<DescriptorError>;
        const Descriptor& first = descriptors[0];
        auto& seq = seqs_[channel_of(first.tag)];
        need(first.link_seq == admitted_, "message missing or repeated");
        need(first.seq == seq, "message of the channel missing or repeated");
        need(first.count == descriptors.size(), "wrong number of tensors");
        for (std::uint32_t i = 0; i < descriptors.size(); ++i) {
            const Descriptor& d = descriptors[i];
            need(d.tag == first.tag && d.count == first.count && d.link_seq == first.link_seq && d.seq == first.seq &&
                     d.body_bytes == first.body_bytes && d.place == first.place,
                 "descriptors of different messages");
            need(d.index == i, "descriptors out of order");
        }
        ++seq;
        ++admitted_;
    }
    std::uint64_t admitted() const { return admitted_; }

  private:
    std::uint64_t admitted_ = 0;
    std::unordered_map<std::uint32_t, std::uint64_t> seqs_;
};

/// Return a text from a peer without control characters, cut to 500 bytes.
inline constexpr std::size_t kCauseBytes = 500;
inline std::string printable(const char* text, std::size_t bytes) {
    std::string result(text, std::min(bytes, kCauseBytes));
    for (char& letter : result)
        if (static_cast<unsigned char>(letter) < 0x20 || letter == 0x7F) letter = ' ';
    return result;
}

}  // namespace ds_ext
