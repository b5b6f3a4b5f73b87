#pragma once

// Message descriptor: 256 bytes per tensor, the same on every transport. kernels/README.md draws the format.

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
inline constexpr std::uint64_t kAlignment = 64;  // of every tensor in the body: a cache line, as in torch
inline constexpr std::uint32_t kMaxTensors = 1u << 16;
inline constexpr std::uint64_t kMaxBodyBytes = std::uint64_t{1} << 62;

struct ElementType {
    const char* name;  // torch's name
    std::uint64_t bytes;
};

// The position is the code on the wire. Only append, or raise kVersion.
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

/// The wire format: little-endian integers without padding, as asserted below.
struct Descriptor {
    std::uint32_t magic = kMagic;
    std::uint16_t version = kVersion;
    std::uint16_t size = kDescriptorBytes;
    std::uint16_t dtype = 0;
    std::uint16_t ndim = 0;
    std::uint32_t tag = 0;           // channel << 16 | item, below 2^31
    std::uint32_t index = 0;         // of this tensor in the message
    std::uint32_t count = 1;         // tensors in the message, at least one
    std::uint64_t seq = 0;           // earlier messages on this channel
    std::uint64_t link_seq = 0;      // earlier messages on this link, on any channel
    std::uint64_t acknowledged = 0;  // all messages of the peer with a lower link_seq have arrived here
    std::uint64_t offset = 0;        // of this tensor in the body
    std::uint64_t nbytes = 0;        // of this tensor
    std::uint64_t body_bytes = 0;    // all tensors with their padding
    std::array<std::int64_t, kMaxDims> shape{};
    std::uint64_t place = 0;  // of the body in a segment or slab; 0 if the body follows in the stream
    std::array<std::uint8_t, 108> reserved{};
    std::uint32_t checksum = 0;  // CRC-32C of all bytes before it
};

static_assert(sizeof(Descriptor) == kDescriptorBytes && offsetof(Descriptor, checksum) == kChecksumOffset);
static_assert(offsetof(Descriptor, seq) == 24 && offsetof(Descriptor, shape) == 72);
static_assert(offsetof(Descriptor, place) == 136);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "ds_ext needs a little-endian machine: the descriptor's memory layout is the wire format"
#endif

inline std::vector<std::int64_t> shape_of(const Descriptor& d) {
    return {d.shape.begin(), d.shape.begin() + std::min<std::size_t>(d.ndim, kMaxDims)};
}

inline void check_dimensions(std::size_t count) {
    if (count > kMaxDims)
        throw DescriptorError("tensor: at most " + std::to_string(kMaxDims) + " dimensions are supported (got " +
                              std::to_string(count) + ")");
}

inline void set_shape(Descriptor& d, const std::vector<std::int64_t>& shape) {
    check_dimensions(shape.size());
    d.ndim = static_cast<std::uint16_t>(shape.size());
    d.shape.fill(0);
    std::copy(shape.begin(), shape.end(), d.shape.begin());
}

/// CRC-32C byte by byte, without the inversions.
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
/// The same with the processor's instruction.
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

/// CRC-32C (Castagnoli). It detects every change within 32 adjacent bits.
inline std::uint32_t checksum(const unsigned char* bytes, std::size_t count) {
#if defined(__x86_64__) && defined(__GNUC__)
    static const bool fast = __builtin_cpu_supports("sse4.2");
    if (fast) return ~crc_by_processor(~0u, bytes, count);
#endif
    return ~crc_by_table(~0u, bytes, count);
}

/// CRC-32C of a record, over all bytes before its last member `checksum`.
template <typename Record>
std::uint32_t checksum_of(const Record& record) {
    return checksum(reinterpret_cast<const unsigned char*>(&record), offsetof(Record, checksum));
}

/// Return the number of elements times the element size. Throws DescriptorError for a negative dimension or an
/// overflow.
inline std::uint64_t tensor_bytes(const Descriptor& d) {
    if (d.dtype >= kElementTypes.size()) throw DescriptorError("unknown dtype code " + std::to_string(d.dtype));
    check_dimensions(d.ndim);
    std::uint64_t bytes = kElementTypes[d.dtype].bytes;
    bool empty = false;
    for (std::size_t i = 0; i < kMaxDims; ++i) {
        const std::int64_t extent = d.shape[i];
        if (extent < 0 || (i >= d.ndim && extent != 0))
            throw DescriptorError("dimension " + std::to_string(i) + " is " + std::to_string(extent));
        if (i >= d.ndim) continue;
        empty = empty || extent == 0;
        const auto factor = extent == 0 ? std::uint64_t{1} : static_cast<std::uint64_t>(extent);
        if (bytes > kMaxBodyBytes / factor) throw DescriptorError("tensor of more than 2^62 bytes");
        bytes *= factor;
    }
    return empty ? 0 : bytes;
}

/// Throw DescriptorError unless all fields are valid and consistent.
inline void validate(const Descriptor& d) {
    const auto need = require<DescriptorError>;
    need(d.magic == kMagic, "wrong magic number: not a descriptor");
    need(d.version == kVersion && d.size == kDescriptorBytes, "descriptor of another version of ds_ext");
    need(d.tag < (1u << 31), "tag not below 2^31");
    need(d.count <= kMaxTensors, "more than 65536 tensors in one message");
    need(d.index < d.count, "index of the tensor not below the count");
    need(d.body_bytes <= kMaxBodyBytes, "message of more than 2^62 bytes");
    need(tensor_bytes(d) == d.nbytes, "shape and dtype do not match the number of bytes");
    need(d.offset % kAlignment == 0, "tensor not aligned to 64 bytes");
    need(d.offset <= d.body_bytes && d.nbytes <= d.body_bytes - d.offset, "tensor exceeds the message");
    for (const std::uint8_t byte : d.reserved) need(byte == 0, "reserved byte not zero");
}

/// Validate `d` and write it with its checksum to `target` (256 bytes, any alignment).
inline void pack(Descriptor d, unsigned char* target) {
    validate(d);
    d.checksum = checksum_of(d);
    std::memcpy(target, &d, kDescriptorBytes);
}

/// Return whether the 256 bytes at `source` have a valid checksum. They have none before all of them have arrived.
inline bool sealed(const unsigned char* source) {
    std::uint32_t stored = 0;
    std::memcpy(&stored, source + kChecksumOffset, sizeof stored);
    return stored == checksum(source, kChecksumOffset);
}

/// Read 256 arbitrary bytes. Copy them before checking, because another process may still write to them.
inline Descriptor unpack(const unsigned char* source) {
    std::array<unsigned char, kDescriptorBytes> bytes{};
    std::memcpy(bytes.data(), source, kDescriptorBytes);
    if (!sealed(bytes.data())) throw DescriptorError("the checksum is wrong: the descriptor was damaged in transit");
    Descriptor d;
    std::memcpy(&d, bytes.data(), kDescriptorBytes);
    validate(d);
    return d;
}

}  // namespace ds_ext
