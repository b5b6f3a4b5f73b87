#pragma once

// Anonymous shared memory. It is passed to another process as a file descriptor and freed after the last process.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "errors.hpp"

namespace ds_ext {

inline constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

/// File descriptor that is closed by the destructor.
class FileDescriptor {
  public:
    explicit FileDescriptor(int number = -1) : number_(number) {}
    FileDescriptor(FileDescriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
    FileDescriptor& operator=(FileDescriptor&& other) noexcept {
        std::swap(number_, other.number_);
        return *this;
    }
    ~FileDescriptor() { close(); }
    int number() const { return number_; }
    void close() {
        if (number_ >= 0) ::close(std::exchange(number_, -1));
    }

  private:
    int number_;
};

class Mapping {
  public:
    /// Create a mapping of `bytes` without memory behind it. Its size is sealed, so that no process can truncate it.
    static Mapping create(std::size_t bytes) {
        FileDescriptor file(memfd());
        const bool sealed = file.number() >= 0;
        if (!sealed && (errno == EMFILE || errno == ENFILE || errno == ENOMEM)) throw_errno("memfd_create");
        // Some containers forbid memfd_create. An O_TMPFILE has no name either, so it cannot be left behind.
        if (!sealed) file = FileDescriptor(open("/dev/shm", O_TMPFILE | O_RDWR | O_EXCL | O_CLOEXEC, 0600));
        if (file.number() < 0) throw_errno("shared memory: both memfd_create and a file in /dev/shm failed");
        if (ftruncate(file.number(), static_cast<off_t>(bytes)) != 0) throw_errno("shared memory: ftruncate");
        if (sealed && fcntl(file.number(), F_ADD_SEALS, kSeals) != 0) throw_errno("shared memory: seals");
        return Mapping(std::move(file), bytes);
    }

    /// Map the memory of a file descriptor from another process. Takes ownership of the descriptor.
    static Mapping attach(int number, std::size_t min_bytes) {
        FileDescriptor file(number);
        struct stat state{};
        if (fstat(file.number(), &state) != 0) throw_errno("shared memory: fstat");
        const int seals = fcntl(file.number(), F_GET_SEALS);
        // F_SEAL_SEAL alone means a file in /dev/shm, which cannot be sealed.
        if (seals >= 0 && seals != F_SEAL_SEAL && (seals & kSeals) != kSeals)
            throw LinkError("shared memory: its size is not sealed");
        const auto bytes = static_cast<std::size_t>(state.st_size);
        if (bytes < min_bytes)
            throw LinkError("shared memory: at least " + std::to_string(min_bytes) + " bytes are needed (got " +
                            std::to_string(bytes) + ")");
        return Mapping(std::move(file), bytes);
    }

    Mapping(Mapping&& other) noexcept
        : file_(std::move(other.file_)), address_(std::exchange(other.address_, nullptr)), bytes_(other.bytes_) {}
    Mapping& operator=(Mapping&&) = delete;
    ~Mapping() {
        if (address_ != nullptr) munmap(address_, bytes_);
    }

    /// Allocate the memory of a range. Otherwise a full host would kill the process by SIGBUS at its first write.
    void commit(std::size_t offset, std::size_t bytes) {
        int failed = 0;
        do failed = fallocate(file_.number(), 0, static_cast<off_t>(offset), static_cast<off_t>(bytes));
        while (failed != 0 && errno == EINTR);
        if (failed != 0) throw_errno("shared memory: no memory for " + std::to_string(bytes) + " bytes");
#ifdef MADV_POPULATE_WRITE
        // Only avoids page faults at the first use; kernels before 5.14 do not have it.
        madvise(address_ + offset, bytes, MADV_POPULATE_WRITE);
#endif
    }

    unsigned char* address() const { return address_; }
    std::size_t bytes() const { return bytes_; }
    int descriptor() const { return file_.number(); }
    void close_descriptor() { file_.close(); }

  private:
    Mapping(FileDescriptor file, std::size_t bytes) : file_(std::move(file)), bytes_(bytes) {
        void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file_.number(), 0);
        if (address == MAP_FAILED)
            throw_errno("shared memory: no address space for " + std::to_string(bytes) + " bytes (see ulimit -v)");
        address_ = static_cast<unsigned char*>(address);
    }

    static int memfd() {
#ifdef MFD_NOEXEC_SEAL
        const int number = memfd_create("ds_ext", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
        if (number >= 0 || errno != EINVAL) return number;
#endif
        return memfd_create("ds_ext", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    }

    FileDescriptor file_;
    unsigned char* address_ = nullptr;
    std::size_t bytes_;
};

}  // namespace ds_ext
