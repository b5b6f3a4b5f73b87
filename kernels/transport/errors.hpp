#pragma once

#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>

namespace ds_ext {

/// A descriptor whose bytes or fields cannot be right. Nothing of the message it heads may be used.
class DescriptorError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

/// What a peer has written beside descriptors and cannot be right: a segment, its counters, a frame.
class LinkError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

/// The error of the last system call, for `what` was wanted.
[[noreturn]] inline void throw_errno(const std::string& what) {
    throw std::system_error(errno, std::generic_category(), what);
}

}  // namespace ds_ext
