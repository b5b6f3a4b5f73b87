#pragma once

// Outgoing data of a tcp connection. The writing thread sends what the socket accepts at once, and the I/O thread sends
// the rest.

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "io_thread.hpp"
#include "pool.hpp"

namespace ds_ext {

/// Thread-safe. A write that throws bad_alloc ends the connection, because the stream is incomplete.
class TcpOutbox : public Owned {
  public:
    static constexpr std::uint32_t kReading = EPOLLIN | EPOLLRDHUP;  // events while no data wait to be sent

    /// `socket` is watched by `io` and outlives this object.
    TcpOutbox(int socket, std::shared_ptr<IoThread> io, std::shared_ptr<Pool> pool)
        : socket_(socket), io_(std::move(io)), pool_(std::move(pool)) {}

    /// Send these parts. The caller may change their memory afterwards.
    void write(std::vector<iovec>& parts) {
        if (!ours()) return;  // asked before the lock, which was perhaps taken when this process was forked
        try {
            put(parts);
        } catch (...) {
            stop();
            throw;
        }
    }

    /// Continue sending: the socket accepts more.
    void resume() {
        std::unique_lock<std::mutex> lock(mutex_);
        if (!flushing_ && !broken_) flush(lock);
    }

    /// Shut down the sending side after all data. Returns whether that is done.
    bool finish() {
        const std::lock_guard<std::mutex> guard(mutex_);
        if (broken_) return true;
        if (flushing_ || !unsent_.empty()) return false;
        shutdown(socket_, SHUT_WR);
        return broken_ = true;
    }

    /// Stop sending and receiving.
    void stop() {
        const std::lock_guard<std::mutex> guard(mutex_);
        broken_ = true;
        unsent_.clear();
        shutdown(socket_, SHUT_RDWR);
    }

  private:
    struct Chunk {
        std::shared_ptr<unsigned char> memory;
        std::size_t at = 0, end = 0;
    };

    void put(std::vector<iovec>& parts) {
        std::unique_lock<std::mutex> lock(mutex_);
        if (broken_) return;
        if (flushing_ || !unsent_.empty()) {
            unsent_.push_back(copy_of(parts));
            return;
        }
        flushing_ = true;
        lock.unlock();
        send_now(parts);
        Chunk rest = parts.empty() ? Chunk{} : copy_of(parts);
        lock.lock();
        flushing_ = false;
        if (rest.memory && !broken_) unsent_.push_front(std::move(rest));
        if (broken_)
            unsent_.clear();
        else if (!unsent_.empty())
            io_->change(socket_, kReading | EPOLLOUT);
    }

    Chunk copy_of(const std::vector<iovec>& parts) {
        std::size_t bytes = 0;
        for (const iovec& part : parts) bytes += part.iov_len;
        Chunk chunk{pool_->take(std::max<std::size_t>(bytes, 1)), 0, bytes};
        unsigned char* target = chunk.memory.get();
        for (const iovec& part : parts) {
            std::memcpy(target, part.iov_base, part.iov_len);
            target += part.iov_len;
        }
        return chunk;
    }

    /// Send until the socket accepts no more. The rest stays in `parts`.
    void send_now(std::vector<iovec>& parts) {
        std::size_t first = 0;
        while (first < parts.size()) {
            msghdr message{};
            message.msg_iov = parts.data() + first;
            message.msg_iovlen = std::min<std::size_t>(parts.size() - first, 512);
            ssize_t sent = sendmsg(socket_, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
            if (sent < 0 && errno == EINTR) continue;
            if (sent < 0) {
                if (errno != EAGAIN && errno != EWOULDBLOCK && errno != ENOBUFS) fail();
                break;
            }
            for (; first < parts.size() && static_cast<std::size_t>(sent) >= parts[first].iov_len; ++first)
                sent -= static_cast<ssize_t>(parts[first].iov_len);
            if (first < parts.size()) {
                parts[first].iov_base = static_cast<unsigned char*>(parts[first].iov_base) + sent;
                parts[first].iov_len -= static_cast<std::size_t>(sent);
            }
        }
        parts.erase(parts.begin(), parts.begin() + static_cast<std::ptrdiff_t>(first));
    }

    /// End the connection. The reader still receives data that arrived before the end.
    void fail() {
        broken_ = true;
        shutdown(socket_, SHUT_RDWR);
    }

    /// Send waiting data until the socket accepts no more.
    void flush(std::unique_lock<std::mutex>& lock) {
        flushing_ = true;
        std::vector<iovec> parts;
        while (!unsent_.empty() && !broken_ && parts.empty()) {
            Chunk chunk = unsent_.front();
            lock.unlock();
            parts = {{chunk.memory.get() + chunk.at, chunk.end - chunk.at}};
            send_now(parts);
            lock.lock();
            if (broken_) break;
            if (parts.empty())
                unsent_.pop_front();
            else
                unsent_.front().at = chunk.end - parts[0].iov_len;
        }
        flushing_ = false;
        if (broken_) unsent_.clear();
        io_->change(socket_, unsent_.empty() ? kReading : kReading | EPOLLOUT);
    }

    const int socket_;
    std::shared_ptr<IoThread> io_;
    std::shared_ptr<Pool> pool_;
    std::mutex mutex_;
    std::deque<Chunk> unsent_;
    bool flushing_ = false;
    std::atomic<bool> broken_{false};
};

}  // namespace ds_ext
