#pragma once

#include "link_bindings.hpp"
#include "tcp_links.hpp"

namespace ds_ext {

inline void bind_tcp(py::module_& m) {
    py::class_<TcpConnection, std::shared_ptr<TcpConnection>>(m, "TcpConnection")
        .def(py::init([](int socket, Port& port, std::uint64_t window, bool receives) {
            auto connection = std::make_shared<TcpConnection>(socket, port.doorbell(), port.io(), window, receives);
            connection->start();
            return connection;
        }));

    py::class_<TcpIncoming, Incoming, std::shared_ptr<TcpIncoming>>(m, "TcpIncoming")
        .def(py::init<std::shared_ptr<TcpConnection>, std::uint32_t>());
    py::class_<TcpOutgoing, Outgoing, std::shared_ptr<TcpOutgoing>>(m, "TcpOutgoing")
        .def(py::init<std::shared_ptr<TcpConnection>>());
}

}  // namespace ds_ext
