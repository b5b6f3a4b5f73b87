#pragma once

// What Python sees of links of every kind, and of a rank's port.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "port.hpp"

namespace ds_ext {

namespace py = pybind11;

// Releasing the interpreter's lock costs more than a short copy.
inline constexpr std::uint64_t kLongCopy = 64 << 10;

// A tensor as Python gives it: (dtype code, shape, address of its bytes).
using GivenPiece = std::tuple<std::uint16_t, std::vector<std::int64_t>, std::uintptr_t>;

inline std::vector<Piece> pieces_of(std::vector<GivenPiece>& given) {
    std::vector<Piece> made;
    for (auto& [dtype, shape, address] : given)
        made.push_back({dtype, std::move(shape), reinterpret_cast<const unsigned char*>(address)});
    return made;
}

/// False when there is no room.
inline bool send(Outgoing& link, std::uint32_t tag, std::vector<GivenPiece> given) {
    const auto pieces = pieces_of(given);
    auto slot = link.reserve(tag, pieces);
    if (!slot) return false;
    if (slot->bytes >= kLongCopy) {
        const py::gil_scoped_release unlocked;
        link.transmit(*slot, pieces);
    } else {
        link.transmit(*slot, pieces);
    }
    return true;
}

/// Of every tensor: (dtype code, shape, elements, offset in the message's memory).
inline py::list layout(const std::vector<Descriptor>& descriptors) {
    py::list found;
    for (const Descriptor& d : descriptors)
        found.append(py::make_tuple(d.dtype, py::tuple(py::cast(shape_of(d))), d.nbytes / kElementTypes[d.dtype].bytes,
                                    d.offset));
    return found;
}

/// Copy the tensors to these addresses, which have room for their bytes, and return the memory.
inline void copy_out(Message& message, const std::vector<std::uintptr_t>& targets) {
    const auto& descriptors = message.descriptors();
    if (targets.size() != descriptors.size()) throw std::runtime_error("one address for each tensor");
    const auto copy = [&] {
        for (std::size_t i = 0; i < targets.size(); ++i)
            if (descriptors[i].nbytes > 0)
                std::memcpy(reinterpret_cast<void*>(targets[i]), message.address() + descriptors[i].offset,
                            descriptors[i].nbytes);
    };
    if (message.bytes() >= kLongCopy) {
        const py::gil_scoped_release unlocked;
        copy();
    } else {
        copy();
    }
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
            const auto made = py::make_tuple(error.code().value(), error.what());
            PyErr_SetObject(PyExc_OSError, made.ptr());
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
