#pragma once

#include "rdma_link.hpp"
#include "shm_bindings.hpp"
#include "tcp_bindings.hpp"

namespace ds_ext {

inline void bind_rdma(py::module_& m) {
    py::register_exception<verbs::VerbsError>(m, "VerbsError", PyExc_RuntimeError);
    m.def("load_verbs", [] { verbs::Library::get(); });
    m.attr("RDMA_FIXED_BYTES") = 2 * kRdmaBlocks * kDescriptorBytes;  // registered per pair, without slabs

    py::class_<RdmaPort, std::shared_ptr<RdmaPort>>(m, "RdmaPort")
        .def(py::init([](Port& rank, const std::string& device, std::uint8_t port, int gid_index) {
            return std::make_shared<RdmaPort>(rank.doorbell(), rank.io(), verbs::PortChoice{device, port, gid_index});
        }));

    py::class_<RdmaIncoming, Incoming, std::shared_ptr<RdmaIncoming>>(m, "RdmaIncoming");
    py::class_<RdmaOutgoing, Outgoing, std::shared_ptr<RdmaOutgoing>>(m, "RdmaOutgoing");
    py::class_<RdmaLink>(m, "RdmaLink")
        .def(py::init<std::shared_ptr<RdmaPort>, std::uint32_t, std::uint32_t, bool, bool, std::uint64_t,
                      std::uint64_t>())
        .def("greeting", [](const RdmaLink& link,
                            std::string_view job) { return py::bytes(link.greeting(address_of(0, 0, job).job)); })
        .def("connect", [](RdmaLink& link, std::string_view greeting,
                           std::string_view job) { link.connect(greeting, address_of(0, 0, job).job); })
        .def("control", &RdmaLink::control)
        .def_property_readonly("incoming", &RdmaLink::incoming)
        .def_property_readonly("outgoing", &RdmaLink::outgoing);
}

}  // namespace ds_ext
