#pragma once

#include <cstdint>
#include <map>
#include <optional>

#include "errors.hpp"

namespace ds_ext {

/// The sender's book of which slots of a segment are lent. Slots are as large as their messages: the lowest free place
/// that is large enough, so that memory which is warm is used again and the segment takes no more than it must.
class Room {
  public:
    explicit Room(std::uint64_t bytes) { free_[0] = bytes; }

    /// The place of a new slot; nothing when no gap is large enough.
    std::optional<std::uint64_t> lend(std::uint64_t bytes) {
        for (auto gap = free_.begin(); gap != free_.end(); ++gap) {
            if (gap->second < bytes) continue;
            const auto [place, size] = *gap;
            free_.erase(gap);
            if (size > bytes) free_[place + bytes] = size - bytes;
            lent_[place] = bytes;
            return place;
        }
        return std::nullopt;
    }

    /// Take a slot back, and join it with the gaps beside it.
    void take_back(std::uint64_t place) {
        const auto slot = lent_.find(place);
        if (slot == lent_.end()) throw LinkError("a slot came back that is not lent");
        auto [begin, bytes] = *slot;
        lent_.erase(slot);
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

    std::size_t lent() const { return lent_.size(); }

  private:
    std::map<std::uint64_t, std::uint64_t> free_, lent_;  // place -> bytes
};

}  // namespace ds_ext
