#pragma once

#include <memory>
#include <string>
#include <vector>

#include "link.hpp"
#include "tcp_connection.hpp"

namespace ds_ext {

/// Receiving endpoint of a tcp link.
class TcpIncoming final : public Incoming {
  public:
    TcpIncoming(std::shared_ptr<TcpConnection> connection, std::uint32_t source)
        : Incoming(source), connection_(std::move(connection)) {}
    ~TcpIncoming() override { connection_->close(); }

    bool has_message() const override { return connection_->has_message(); }
    Arrival take() override { return connection_->take(); }
    void release(const Arrival&) override {}
    std::string end_reason() const override { return connection_->end_reason(); }
    void abort(const std::string& cause) override { connection_->abort(cause); }
    void close() override { connection_->close(); }

  private:
    std::shared_ptr<TcpConnection> connection_;
};

/// Sending endpoint of a tcp link.
class TcpOutgoing final : public Outgoing {
  public:
    explicit TcpOutgoing(std::shared_ptr<TcpConnection> connection)
        : Outgoing(connection->window()), connection_(std::move(connection)) {}
    ~TcpOutgoing() override { connection_->close(); }

    bool has_update() const override { return connection_->taken() != seen_; }
    std::string end_reason() const override { return connection_->end_reason(); }
    void abort(const std::string& cause) override { connection_->abort(cause); }
    void close() override { connection_->close(); }

  protected:
    bool allocate(Slot&) override { return true; }
    std::uint64_t taken() override { return seen_ = connection_->taken(); }

    /// Write directly from the tensors. Only data that the socket does not accept at once are copied.
    void put(Slot& slot, const std::vector<Piece>& pieces) override {
        static constexpr unsigned char zeros[kAlignment] = {};
        slot.descriptors[0].acknowledged = connection_->taken_here();
        std::vector<unsigned char> table(slot.descriptors.size() * kDescriptorBytes);
        for (std::size_t i = 0; i < slot.descriptors.size(); ++i)
            pack(slot.descriptors[i], table.data() + i * kDescriptorBytes);
        std::vector<iovec> parts{{table.data(), table.size()}};
        for (std::size_t i = 0; i < pieces.size(); ++i) {
            const std::uint64_t bytes = slot.descriptors[i].nbytes, padding = aligned(bytes) - bytes;
            if (bytes > 0) parts.push_back({const_cast<unsigned char*>(pieces[i].address), bytes});
            if (padding > 0) parts.push_back({const_cast<unsigned char*>(zeros), padding});
        }
        connection_->outbox().write(parts);
    }

  private:
    std::shared_ptr<TcpConnection> connection_;
    std::uint64_t seen_ = 0;
};

}  // namespace ds_ext
