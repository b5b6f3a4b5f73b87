#pragma once

#include "link_bindings.hpp"
#include "shm_incoming.hpp"
#include "shm_outgoing.hpp"

namespace ds_ext {

inline Address address_of(std::uint32_t source, std::uint32_t destination, std::string_view job) {
    Address address{source, destination, {}};
    if (job.size() != address.job.size()) throw LinkError("job token: must have 16 bytes");
    std::memcpy(address.job.data(), job.data(), job.size());
    return address;
}

inline void bind_shm(py::module_& m) {
    py::class_<ShmIncoming, Incoming, std::shared_ptr<ShmIncoming>>(m, "ShmIncoming")
        .def(py::init([](std::uint32_t source, std::uint32_t destination, std::string_view job) {
            return std::make_shared<ShmIncoming>(address_of(source, destination, job));
        }))
        .def("connect", &ShmIncoming::connect)
        .def("fileno", &ShmIncoming::descriptor);

    py::class_<ShmOutgoing, Outgoing, std::shared_ptr<ShmOutgoing>>(m, "ShmOutgoing")
        .def(py::init([](int segment, int doorbell, std::uint32_t source, std::uint32_t destination,
                         std::string_view job, std::uint64_t window) {
            return std::make_shared<ShmOutgoing>(segment, doorbell, address_of(source, destination, job), window);
        }));
}

}  // namespace ds_ext
