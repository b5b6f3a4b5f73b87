#pragma once

#include <memory>
#include <string>
#include <vector>

#include "link.hpp"
#include "tcp_connection.hpp"

namespace ds_ext {

/// The receiving end over a connection.
class TcpIncoming final : public Incoming {
  public:
    TcpIncoming(std::shared_ptr<TcpConnection> connection, std::uint32_t source)
        : Incoming(source), connection_(std::move(connection)) {}
    ~TcpIncoming() override { connection_->close(); }

    bool news() const override { return connection_->news(); }
    Arrival take() override { return connection_->take(); }
    void give_back(const Arrival&) override {}
    std::string gone() const override { return connection_->gone(); }
    void abort(const std::string& cause) override { connection_->abort(cause); }
    void close() override { connection_->close(); }

  private:
    std::shared_ptr<TcpConnection> connection_;
};

/// The sending end over a connection.
class TcpOutgoing final : public Outgoing {
  public:
    explicit TcpOutgoing(std::shared_ptr<TcpConnection> connection)
        : Outgoing(connection->window()), connection_(std::move(connection)) {}
    ~TcpOutgoing() override { connection_->close(); }

    unsigned char* body(Slot& slot) override {
        if (!slot.memory) {
            auto memory = connection_->memory(table_bytes(slot) + std::max<std::uint64_t>(body_bytes(slot), 1));
            slot.address = memory.get() + table_bytes(slot);
            slot.memory = std::move(memory);
        }
        return slot.address;
    }
    void cancel(Slot& slot) override { slot.memory.reset(); }
    bool news() const override { return connection_->taken() != seen_; }
    std::string gone() const override { return connection_->gone(); }
    void abort(const std::string& cause) override { connection_->abort(cause); }
    void close() override { connection_->close(); }

  protected:
    bool lend(Slot&) override { return true; }
    std::uint64_t taken() override { return seen_ = connection_->taken(); }

    void deliver(Slot& slot) override {
        auto memory = std::static_pointer_cast<unsigned char>(slot.memory);
        pack_table(slot, memory.get());
        connection_->outbox().write(std::move(memory), table_bytes(slot) + body_bytes(slot));
    }

    /// Straight from the tensors: what the socket takes at once needs no memory of ours.
    void put(Slot& slot, const std::vector<Piece>& pieces, std::shared_ptr<void>) override {
        static constexpr unsigned char zeros[kAlignment] = {};
        std::vector<unsigned char> table(table_bytes(slot));
        pack_table(slot, table.data());
        std::vector<iovec> parts{{table.data(), table.size()}};
        for (std::size_t i = 0; i < pieces.size(); ++i) {
            const std::uint64_t bytes = slot.descriptors[i].nbytes, padding = aligned(bytes) - bytes;
            if (bytes > 0) parts.push_back({const_cast<unsigned char*>(pieces[i].address), bytes});
            if (padding > 0) parts.push_back({const_cast<unsigned char*>(zeros), padding});
        }
        connection_->outbox().write(parts);
    }

  private:
    static std::uint64_t table_bytes(const Slot& slot) { return slot.descriptors.size() * kDescriptorBytes; }
    static std::uint64_t body_bytes(const Slot& slot) { return slot.descriptors[0].body_bytes; }

    void pack_table(Slot& slot, unsigned char* table) {
        slot.descriptors[0].acknowledged = connection_->taken_here();
        for (std::size_t i = 0; i < slot.descriptors.size(); ++i)
            pack(slot.descriptors[i], table + i * kDescriptorBytes);
    }

    std::shared_ptr<TcpConnection> connection_;
    std::uint64_t seen_ = 0;
};

}  // namespace ds_ext
