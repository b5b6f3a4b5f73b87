#pragma once

#include <cstdint>
#include <map>
#include <optional>

#include "errors.hpp"

namespace ds_ext {

/// Allocator of the slots of a segment or slab, at the sender. First fit from the start, so that warm memory is reused
/// and a segment stays small.
class SlotAllocator {
  public:
    explicit SlotAllocator(std::uint64_t bytes) { free_[0] = bytes; }

    /// Return the place of a new slot; nothing if no gap is large enough.
    std::optional<std::uint64_t> allocate(std::uint64_t bytes) {
        for (auto gap = free_.begin(); gap != free_.end(); ++gap) {
            if (gap->second < bytes) continue;
            const auto [place, size] = *gap;
            free_.erase(gap);
            if (size > bytes) free_[place + bytes] = size - bytes;
            allocated_[place] = bytes;
            return place;
        }
        return std::nullopt;
    }

    /// Free a slot and merge it with adjacent gaps. LinkError: it is not allocated.
    void release(std::uint64_t place) {
        const auto slot = allocated_.find(place);
        if (slot == allocated_.end()) throw LinkError("release of a slot that is not allocated");
        auto [begin, bytes] = *slot;
        allocated_.erase(slot);
        auto next = free_.lower_bound(begin);
        if (next != free_.end() && next->first == begin + bytes) {
            bytes += next->second;
            next = free_.erase(next);
        }
        if (next != free_.begin()) {
            const auto previous = std::prev(next);
            if (previous->first + previous->second == begin) {
                previous->second += bytes;
                return;
            }
        }
        free_[begin] = bytes;
    }

    std::size_t allocated() const { return allocated_.size(); }

  private:
    std::map<std::uint64_t, std::uint64_t> free_, allocated_;  // place -> bytes
};

}  // namespace ds_ext
