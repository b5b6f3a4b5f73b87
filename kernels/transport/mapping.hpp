#pragma once

// Shared memory without a name: it is passed to another process as a file descriptor and is gone with the last process
// that has it.

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

/// A file descriptor that closes itself.
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
    /// New memory of `bytes`, none of it taken yet. Its size is sealed: no process can truncate it under a reader.
    static Mapping create(std::size_t bytes) {
        FileDescriptor file(memfd());
        const bool sealed = file.number() >= 0;
        if (!sealed && (errno == EMFILE || errno == ENFILE || errno == ENOMEM)) throw_errno("memfd_create");
        // Where memfd_create is forbidden: a file that never has a name, so nothing is left behind either.
        if (!sealed) file = FileDescriptor(open("/dev/shm", O_TMPFILE | O_RDWR | O_EXCL | O_CLOEXEC, 0600));
        if (file.number() < 0) throw_errno("shared memory: memfd_create and a file in /dev/shm are both refused");
        if (ftruncate(file.number(), static_cast<off_t>(bytes)) != 0) throw_errno("shared memory: ftruncate");
        if (sealed && fcntl(file.number(), F_ADD_SEALS, kSeals) != 0) throw_errno("shared memory: seals");
        return Mapping(std::move(file), bytes);
    }

    /// The memory behind a descriptor from another process; takes the descriptor over.
    static Mapping attach(int number, std::size_t least_bytes) {
        FileDescriptor file(number);
        struct stat state{};
        if (fstat(file.number(), &state) != 0) throw_errno("shared memory: fstat");
        const int seals = fcntl(file.number(), F_GET_SEALS);
        // A file in /dev/shm cannot be sealed, which is what F_SEAL_SEAL alone says.
        if (seals >= 0 && seals != F_SEAL_SEAL && (seals & kSeals) != kSeals)
            throw LinkError("the memory's size is not sealed");
        const auto bytes = static_cast<std::size_t>(state.st_size);
        if (bytes < least_bytes)
            throw LinkError("the memory has " + std::to_string(bytes) + " bytes, not the " +
                            std::to_string(least_bytes) + " of a segment");
        return Mapping(std::move(file), bytes);
    }

    Mapping(Mapping&& other) noexcept
        : file_(std::move(other.file_)), address_(std::exchange(other.address_, nullptr)), bytes_(other.bytes_) {}
    Mapping& operator=(Mapping&&) = delete;
    ~Mapping() {
        if (address_ != nullptr) munmap(address_, bytes_);
    }

    /// Take memory for a range now. Without it a full host would kill the process at its first write, by SIGBUS.
    void commit(std::size_t offset, std::size_t bytes) {
        int failed = 0;
        do failed = fallocate(file_.number(), 0, static_cast<off_t>(offset), static_cast<off_t>(bytes));
        while (failed != 0 && errno == EINTR);
        if (failed != 0) throw_errno("no memory for " + std::to_string(bytes) + " bytes of a segment");
#ifdef MADV_POPULATE_WRITE
        // Only saves the page faults of the first use, so a kernel without it (before 5.14) does no harm.
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
        if (address == MAP_FAILED) throw_errno("no address space for " + std::to_string(bytes) + " bytes (ulimit -v)");
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
