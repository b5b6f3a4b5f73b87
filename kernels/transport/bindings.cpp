#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "descriptor.hpp"
#include "rdma_bindings.hpp"
#include "shm_bindings.hpp"
#include "tcp_bindings.hpp"

namespace py = pybind11;
using ds_ext::Descriptor;

PYBIND11_MODULE(_native, m) {
    m.doc() = "Descriptors of messages, and links between ranks. kernels/README.md draws the formats.";
    py::register_exception<ds_ext::DescriptorError>(m, "DescriptorError", PyExc_ValueError);
    m.attr("DESCRIPTOR_BYTES") = ds_ext::kDescriptorBytes;
    py::list types;
    for (const auto& type : ds_ext::kElementTypes) types.append(py::make_tuple(type.name, type.bytes));
    m.attr("ELEMENT_TYPES") = py::tuple(types);

    auto cls = py::class_<Descriptor>(m, "Descriptor").def(py::init<>());
    cls.def_readwrite("dtype", &Descriptor::dtype).def_readwrite("tag", &Descriptor::tag);
    cls.def_readwrite("index", &Descriptor::index).def_readwrite("count", &Descriptor::count);
    cls.def_readwrite("seq", &Descriptor::seq).def_readwrite("link_seq", &Descriptor::link_seq);
    cls.def_readwrite("acknowledged", &Descriptor::acknowledged).def_readwrite("offset", &Descriptor::offset);
    cls.def_readwrite("nbytes", &Descriptor::nbytes).def_readwrite("body_bytes", &Descriptor::body_bytes);
    cls.def_readwrite("place", &Descriptor::place);
    cls.def_property(
        "shape", [](const Descriptor& d) { return py::tuple(py::cast(ds_ext::shape_of(d))); }, &ds_ext::set_shape);

    m.def("describe", [](std::uint32_t tag, std::vector<ds_ext::PyPiece> pieces) {
        return ds_ext::describe(tag, ds_ext::pieces_of(pieces));
    });
    // The caller guarantees 256 valid bytes at the address.
    const auto at = [](std::uintptr_t address) { return reinterpret_cast<unsigned char*>(address); };
    m.def("pack_at", [at](const Descriptor& d, std::uintptr_t address) { ds_ext::pack(d, at(address)); });
    m.def("unpack_at", [at](std::uintptr_t address) { return ds_ext::unpack(at(address)); });
    m.def("sealed_at", [at](std::uintptr_t address) { return ds_ext::sealed(at(address)); });
    ds_ext::bind_links(m);
    ds_ext::bind_shm(m);
    ds_ext::bind_tcp(m);
    ds_ext::bind_rdma(m);
}
