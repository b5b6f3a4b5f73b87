#pragma once

#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>

namespace ds_ext {

/// Invalid bytes or fields of a descriptor. The message must not be used.
class DescriptorError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

/// Invalid data of a peer other than a descriptor: a segment, its counters, a frame.
class LinkError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

/// Throw `Error` unless `holds`.
template <typename Error>
void require(bool holds, const char* what) {
    if (!holds) throw Error(what);
}

/// Throw the error of the last system call; `what` names the operation.
[[noreturn]] inline void throw_errno(const std::string& what) {
    throw std::system_error(errno, std::generic_category(), what);
}

}  // namespace ds_ext
