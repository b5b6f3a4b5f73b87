#pragma once

// The 256 bytes that describe one tensor of a message. Every transport sends the same bytes; kernels/README.md draws
// them.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "errors.hpp"

namespace ds_ext {

inline constexpr std::size_t kDescriptorBytes = 256;
inline constexpr std::size_t kChecksumOffset = kDescriptorBytes - 4;
inline constexpr std::size_t kMaxDims = 8;
inline constexpr std::uint32_t kMagic = 0x31585344;  // "DSX1" in memory
inline constexpr std::uint16_t kVersion = 1;
inline constexpr std::uint64_t kAlignment = 64;  // of every tensor in the body: a cache line, and torch's own choice
inline constexpr std::uint32_t kMaxTensors = 1u << 16;
inline constexpr std::uint64_t kMaxBodyBytes = std::uint64_t{1} << 62;

struct ElementType {
    const char* name;  // as torch calls it
    std::uint64_t bytes;
};

// The position is the code on the wire: append only, or raise kVersion.
inline constexpr std::array<ElementType, 17> kElementTypes{{
    {"bool", 1},
    {"uint8", 1},
    {"int8", 1},
    {"int16", 2},
    {"int32", 4},
    {"int64", 8},
    {"float16", 2},
    {"bfloat16", 2},
    {"float32", 4},
    {"float64", 8},
    {"complex64", 8},
    {"complex128", 16},
    {"uint16", 2},
    {"uint32", 4},
    {"uint64", 8},
    {"float8_e4m3fn", 1},
    {"float8_e5m2", 1},
}};

/// All integers are little-endian. The members are laid out without padding (checked below), so the struct is the wire.
struct Descriptor {
    std::uint32_t magic = kMagic;
    std::uint16_t version = kVersion;
    std::uint16_t size = kDescriptorBytes;
    std::uint16_t dtype = 0;
    std::uint16_t ndim = 0;
    std::uint32_t tag = 0;           // channel << 16 | item, below 2^31
    std::uint32_t index = 0;         // which tensor of the message this is
    std::uint32_t count = 1;         // tensors in the message, at least one
    std::uint64_t seq = 0;           // messages sent before on this channel
    std::uint64_t link_seq = 0;      // messages sent before to this peer, on any channel
    std::uint64_t acknowledged = 0;  // messages of the peer, by link_seq from 0 on, that have all arrived here
    std::uint64_t offset = 0;        // of this tensor in the body
    std::uint64_t nbytes = 0;        // of this tensor
    std::uint64_t body_bytes = 0;    // of all tensors with their alignment
    std::array<std::int64_t, kMaxDims> shape{};
    std::uint64_t place = 0;  // of the body in a shared segment; 0 where the body travels by itself
    std::array<std::uint8_t, 108> reserved{};
    std::uint32_t checksum = 0;  // CRC-32C of all bytes before it
};

static_assert(sizeof(Descriptor) == kDescriptorBytes && offsetof(Descriptor, checksum) == kChecksumOffset);
static_assert(offsetof(Descriptor, seq) == 24 && offsetof(Descriptor, shape) == 72);
static_assert(offsetof(Descriptor, place) == 136);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the descriptor is written as it lies in memory: this needs a little-endian machine"
#endif

inline std::vector<std::int64_t> shape_of(const Descriptor& d) {
    return {d.shape.begin(), d.shape.begin() + std::min<std::size_t>(d.ndim, kMaxDims)};
}

inline void set_shape(Descriptor& d, const std::vector<std::int64_t>& shape) {
    if (shape.size() > kMaxDims)
        throw DescriptorError(std::to_string(shape.size()) + " dimensions; at most " + std::to_string(kMaxDims) +
                              " travel");
    d.ndim = static_cast<std::uint16_t>(shape.size());
    d.shape.fill(0);
    std::copy(shape.begin(), shape.end(), d.shape.begin());
}

/// CRC-32C byte by byte, without its inversions.
inline std::uint32_t crc_by_table(std::uint32_t crc, const unsigned char* bytes, std::size_t count) {
    static constexpr auto table = [] {
        std::array<std::uint32_t, 256> entries{};
        for (std::uint32_t i = 0; i < 256; ++i) {
            std::uint32_t value = i;
            for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ (value & 1 ? 0x82F63B78u : 0u);
            entries[i] = value;
        }
        return entries;
    }();
    for (std::size_t i = 0; i < count; ++i) crc = table[(crc ^ bytes[i]) & 0xFF] ^ (crc >> 8);
    return crc;
}

#if defined(__x86_64__) && defined(__GNUC__)
/// The same by the processor's own instruction.
__attribute__((target("sse4.2"))) inline std::uint32_t crc_by_processor(std::uint32_t crc, const unsigned char* bytes,
                                                                        std::size_t count) {
    std::uint64_t wide = crc;
    for (; count >= 8; count -= 8, bytes += 8) {
        std::uint64_t word = 0;
        std::memcpy(&word, bytes, sizeof word);
        wide = __builtin_ia32_crc32di(wide, word);
    }
    crc = static_cast<std::uint32_t>(wide);
    for (; count > 0; --count, ++bytes) crc = __builtin_ia32_crc32qi(crc, *bytes);
    return crc;
}
#endif

/// CRC-32C (Castagnoli), which finds every change within 32 neighbouring bits.
inline std::uint32_t checksum(const unsigned char* bytes, std::size_t count) {
#if defined(__x86_64__) && defined(__GNUC__)
    static const bool fast = __builtin_cpu_supports("sse4.2");
    if (fast) return ~crc_by_processor(~0u, bytes, count);
#endif
    return ~crc_by_table(~0u, bytes, count);
}

/// Elements times element size, or DescriptorError if a dimension is negative or the product does not fit.
inline std::uint64_t tensor_bytes(const Descriptor& d) {
    if (d.dtype >= kElementTypes.size()) throw DescriptorError("unknown dtype code " + std::to_string(d.dtype));
    if (d.ndim > kMaxDims)
        throw DescriptorError(std::to_string(d.ndim) + " dimensions; at most " + std::to_string(kMaxDims) + " travel");
    std::uint64_t bytes = kElementTypes[d.dtype].bytes;
    bool empty = false;
    for (std::size_t i = 0; i < kMaxDims; ++i) {
        const std::int64_t extent = d.shape[i];
        if (extent < 0 || (i >= d.ndim && extent != 0))
            throw DescriptorError("dimension " + std::to_string(i) + " is " + std::to_string(extent));
        if (i >= d.ndim) continue;
        empty = empty || extent == 0;
        const auto factor = extent == 0 ? std::uint64_t{1} : static_cast<std::uint64_t>(extent);
        if (bytes > kMaxBodyBytes / factor) throw DescriptorError("the shape has more than 2^62 bytes");
        bytes *= factor;
    }
    return empty ? 0 : bytes;
}

/// Checks every field against every other; DescriptorError says which does not hold.
inline void validate(const Descriptor& d) {
    const auto need = [](bool holds, const char* what) {
        if (!holds) throw DescriptorError(what);
    };
    need(d.magic == kMagic, "the magic number is wrong: these bytes are no descriptor");
    need(d.version == kVersion && d.size == kDescriptorBytes, "made by another version of ds_ext");
    need(d.tag < (1u << 31), "the tag is not below 2^31");
    need(d.count <= kMaxTensors, "more than 65536 tensors in one message");
    need(d.index < d.count, "the tensor's index is not below the count");
    need(d.body_bytes <= kMaxBodyBytes, "the message has more than 2^62 bytes");
    need(tensor_bytes(d) == d.nbytes, "shape and dtype do not give the number of bytes");
    need(d.offset % kAlignment == 0, "the tensor is not aligned to 64 bytes");
    need(d.offset <= d.body_bytes && d.nbytes <= d.body_bytes - d.offset, "the tensor ends behind the message");
    for (const std::uint8_t byte : d.reserved) need(byte == 0, "a reserved byte is not zero");
}

/// Writes `d` to `target` (256 bytes, any alignment) with its checksum; refuses what unpack would refuse.
inline void pack(Descriptor d, unsigned char* target) {
    validate(d);
    std::memcpy(target, &d, kDescriptorBytes);
    d.checksum = checksum(target, kChecksumOffset);
    std::memcpy(target + kChecksumOffset, &d.checksum, sizeof d.checksum);
}

/// True if the 256 bytes at `source` carry their own checksum: false while they are still on their way.
inline bool sealed(const unsigned char* source) {
    std::uint32_t stored = 0;
    std::memcpy(&stored, source + kChecksumOffset, sizeof stored);
    return stored == checksum(source, kChecksumOffset);
}

/// Reads 256 arbitrary bytes. They are copied once before they are checked: another process may write to them.
inline Descriptor unpack(const unsigned char* source) {
    std::array<unsigned char, kDescriptorBytes> bytes{};
    std::memcpy(bytes.data(), source, kDescriptorBytes);
    if (!sealed(bytes.data())) throw DescriptorError("the checksum is wrong: the descriptor was damaged on its way");
    Descriptor d;
    std::memcpy(&d, bytes.data(), kDescriptorBytes);
    validate(d);
    return d;
}

}  // namespace ds_ext
