#pragma once

// Python bindings of links of every kind, and of a rank's port.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "port.hpp"

namespace ds_ext {

namespace py = pybind11;

// Below this size, a copy takes less time than releasing the GIL.
inline constexpr std::uint64_t kLongCopy = 64 << 10;

/// Call `copy`, without the GIL if it copies many bytes.
template <typename Copy>
void copy_unlocked(std::uint64_t bytes, Copy copy) {
    std::optional<py::gil_scoped_release> unlocked;
    if (bytes >= kLongCopy) unlocked.emplace();
    copy();
}

// Tensor to send, from Python: (dtype code, shape, address of its bytes).
using PyPiece = std::tuple<std::uint16_t, std::vector<std::int64_t>, std::uintptr_t>;

inline std::vector<Piece> pieces_of(std::vector<PyPiece>& tensors) {
    std::vector<Piece> pieces;
    for (auto& [dtype, shape, address] : tensors)
        pieces.push_back({dtype, std::move(shape), reinterpret_cast<const unsigned char*>(address)});
    return pieces;
}

/// Send a message. Returns false without a link credit.
inline bool send(Outgoing& link, std::uint32_t tag, std::vector<PyPiece> tensors) {
    const auto pieces = pieces_of(tensors);
    auto slot = link.reserve(tag, pieces);
    if (!slot) return false;
    copy_unlocked(slot->bytes, [&] { link.transmit(*slot, pieces); });
    return true;
}

/// Return (dtype code, shape, elements, offset in the message's memory) of every tensor.
inline py::list layout(const std::vector<Descriptor>& descriptors) {
    py::list tensors;
    for (const Descriptor& d : descriptors)
        tensors.append(py::make_tuple(d.dtype, py::tuple(py::cast(shape_of(d))),
                                      d.nbytes / kElementTypes[d.dtype].bytes, d.offset));
    return tensors;
}

/// Copy the tensors to these addresses and release the message.
inline void copy_out(Message& message, const std::vector<std::uintptr_t>& targets) {
    const auto& descriptors = message.descriptors();
    if (targets.size() != descriptors.size()) throw std::runtime_error("copy_out needs one address per tensor");
    copy_unlocked(message.bytes(), [&] {
        for (std::size_t i = 0; i < targets.size(); ++i)
            if (descriptors[i].nbytes > 0)
                std::memcpy(reinterpret_cast<void*>(targets[i]), message.address() + descriptors[i].offset,
                            descriptors[i].nbytes);
    });
    message.release();
}

inline py::buffer_info bytes_at(unsigned char* address, std::uint64_t count) {
    return {address, static_cast<py::ssize_t>(count)};
}

inline void bind_links(py::module_& m) {
    count_forks();
    py::register_exception<LinkError>(m, "LinkError", PyExc_ValueError);
    py::register_exception_translator([](std::exception_ptr raised) {
        try {
            if (raised) std::rethrow_exception(raised);
        } catch (const std::system_error& error) {
            const auto arguments = py::make_tuple(error.code().value(), error.what());
            PyErr_SetObject(PyExc_OSError, arguments.ptr());
        }
    });

    py::class_<Message>(m, "Message", py::buffer_protocol())
        .def_property_readonly("source", &Message::source)
        .def_property_readonly("tag", [](const Message& message) { return message.descriptors()[0].tag; })
        .def_property_readonly("seq", [](const Message& message) { return message.descriptors()[0].seq; })
        .def_property_readonly("layout", [](const Message& message) { return layout(message.descriptors()); })
        .def("hold", &Message::hold)
        .def_property_readonly("nbytes", &Message::bytes)
        .def("copy_out", &copy_out)
        .def_buffer([](Message& message) { return bytes_at(message.address(), message.bytes()); });

    py::class_<Incoming, std::shared_ptr<Incoming>>(m, "Incoming")
        .def_property_readonly("source", &Incoming::source)
        .def("end_reason", &Incoming::end_reason)
        .def("held", [](Incoming& link) { return link.held().load(); })
        .def("abort", &Incoming::abort)
        .def("close", &Incoming::close);

    py::class_<Outgoing, std::shared_ptr<Outgoing>>(m, "Outgoing")
        .def("send", &send)
        .def("in_flight",
             [](Outgoing& link) {
                 const auto [messages, tag, slots] = link.in_flight();
                 return py::make_tuple(messages, tag, slots);
             })
        .def("end_reason", &Outgoing::end_reason)
        .def("abort", &Outgoing::abort)
        .def("close", &Outgoing::close);

    py::class_<Port>(m, "Port")
        .def(py::init<>())
        .def("spin", &Port::spin)
        .def("fileno", &Port::descriptor)
        .def("close_fileno", &Port::close_descriptor)
        .def("add", &Port::add)
        .def("take", &Port::take)
        .def("wait_arrival", &Port::wait_arrival, py::call_guard<py::gil_scoped_release>())
        .def("wait_credit", &Port::wait_credit, py::call_guard<py::gil_scoped_release>());
}

}  // namespace ds_ext
