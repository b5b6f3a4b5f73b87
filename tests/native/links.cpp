// Both endpoints of links in one process, each in a separate thread, for the thread sanitizer. Every message is
// compared. Exit status 0: all messages were right.

#include <arpa/inet.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <thread>

#include "port.hpp"
#include "shm_incoming.hpp"
#include "shm_outgoing.hpp"
#include "tcp_links.hpp"

using namespace ds_ext;

namespace {

struct Endpoint {
    Port port;
    std::shared_ptr<Incoming> incoming;
    std::shared_ptr<Outgoing> outgoing;
};

constexpr std::uint64_t kWindow = 4 << 20;

/// Return the number of elements of a message. Some messages are large enough for the copier thread.
int count_of(int message) {
    return 1 + message * 37 % 50000 + (message % 20 == 0 ? static_cast<int>(kLargeCopy) / 4 : 0);
}

void need(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "failed: %s\n", what);
    std::_Exit(1);
}

void link_by_shm(Endpoint& left, Endpoint& right) {
    Endpoint* endpoints[] = {&left, &right};
    std::shared_ptr<ShmIncoming> made[2];
    for (std::uint32_t me : {0u, 1u}) made[me] = std::make_shared<ShmIncoming>(Address{1 - me, me, {}});
    for (std::uint32_t me : {0u, 1u}) {
        const std::uint32_t peer = 1 - me;
        endpoints[me]->outgoing = std::make_shared<ShmOutgoing>(
            dup(made[peer]->descriptor()), dup(endpoints[peer]->port.descriptor()), Address{me, peer, {}}, kWindow);
    }
    for (std::uint32_t me : {0u, 1u}) {
        made[me]->connect(dup(endpoints[1 - me]->port.descriptor()));
        endpoints[me]->incoming = made[me];
    }
}

void link_by_tcp(Endpoint& left, Endpoint& right) {
    const int listener = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t bytes = sizeof address;
    auto* any = reinterpret_cast<sockaddr*>(&address);
    need(bind(listener, any, bytes) == 0 && listen(listener, 1) == 0 && getsockname(listener, any, &bytes) == 0,
         "a listening socket");
    const int first = socket(AF_INET, SOCK_STREAM, 0);
    need(connect(first, any, bytes) == 0, "a connection");
    const int second = accept(listener, nullptr, nullptr);
    close(listener);
    for (auto [endpoint, file, peer] : {std::tuple{&left, first, 1u}, std::tuple{&right, second, 0u}}) {
        auto connection =
            std::make_shared<TcpConnection>(file, endpoint->port.doorbell(), endpoint->port.io(), kWindow, true);
        connection->start();
        endpoint->incoming = std::make_shared<TcpIncoming>(connection, peer);
        endpoint->outgoing = std::make_shared<TcpOutgoing>(connection);
    }
}

/// Send and receive the same number of messages as the peer, with random lifetimes.
void exchange(Endpoint& endpoint, int messages, unsigned seed) {
    std::mt19937 draw(seed);
    std::vector<std::unique_ptr<Message>> kept;
    endpoint.port.add(endpoint.incoming);
    endpoint.port.spin(20);
    int sent = 0, got = 0;
    const auto take = [&] {
        for (auto& message : endpoint.port.take()) {
            const int first = *reinterpret_cast<int*>(message->address());
            const int count = static_cast<int>(message->descriptors()[0].shape[0]);
            need(first == got && count == count_of(got), "a message in its order");
            need(reinterpret_cast<int*>(message->address())[count - 1] == (count == 1 ? got : got + count - 1),
                 "its last number");
            ++got;
            kept.push_back(std::move(message));
            if (kept.size() > 40) kept.erase(kept.begin() + draw() % 20, kept.begin() + 20 + draw() % 20);
        }
    };
    while (sent < messages || got < messages) {
        if (sent < messages) {
            const int count = count_of(sent);
            std::vector<int> data(count);
            std::iota(data.begin(), data.end(), sent);
            const std::vector<Piece> pieces{{4, {count}, reinterpret_cast<unsigned char*>(data.data())}};
            if (auto slot = endpoint.outgoing->reserve(7, pieces)) {
                endpoint.outgoing->transmit(*slot, pieces);
                std::fill(data.begin(), data.end(), -1);  // the sender may change it
                ++sent;
            } else {
                endpoint.port.wait_credit(*endpoint.outgoing, 0.02);
            }
        } else {
            endpoint.port.wait_arrival(0.02);
        }
        take();
        const std::string reason = endpoint.incoming->end_reason();
        need(reason.empty() || got == messages, ("a peer that stays, but it " + reason).c_str());
    }
    while (endpoint.outgoing->in_flight().messages > 0) endpoint.port.wait_credit(*endpoint.outgoing, 0.02);
    kept.clear();
    if (seed % 2) endpoint.outgoing->abort("the test is over");
    endpoint.incoming->close();
    endpoint.outgoing->close();
}

void run(const char* name, void (*link)(Endpoint&, Endpoint&), int messages) {
    Endpoint left, right;
    link(left, right);
    std::thread other([&] { exchange(right, messages, 1); });
    exchange(left, messages, 2);
    other.join();
    std::printf("%s: %d messages each way\n", name, messages);
}

}  // namespace

int main(int count, char** words) {
    count_forks();
    const int messages = count > 1 ? std::atoi(words[1]) : 3000;
    for (int repeat = 0; repeat < 3; ++repeat) {
        run("shm", link_by_shm, messages);
        run("tcp", link_by_tcp, messages);
    }
}
