#pragma once

#include <stdexcept>

namespace ds_ext {

/// A descriptor whose bytes or fields cannot be right. Nothing of the message it heads may be used.
class DescriptorError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

}  // namespace ds_ext
