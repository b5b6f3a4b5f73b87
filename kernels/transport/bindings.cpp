#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "descriptor.hpp"
#include "rdma_bindings.hpp"
#include "shm_bindings.hpp"
#include "tcp_bindings.hpp"

namespace py = pybind11;
using ds_ext::Descriptor;

PYBIND11_MODULE(_native, m) {
    m.doc() = "Messages between ranks: descriptors and links; kernels/README.md draws them.";
    py::register_exception<ds_ext::DescriptorError>(m, "DescriptorError", PyExc_ValueError);
    m.attr("DESCRIPTOR_BYTES") = ds_ext::kDescriptorBytes;
    m.attr("ALIGNMENT") = ds_ext::kAlignment;
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

    m.def("pack", [](const Descriptor& d) {
        unsigned char bytes[ds_ext::kDescriptorBytes];
        ds_ext::pack(d, bytes);
        return py::bytes(reinterpret_cast<const char*>(bytes), sizeof bytes);
    });
    m.def("unpack", [](std::string_view bytes) {
        if (bytes.size() != ds_ext::kDescriptorBytes) throw ds_ext::DescriptorError("a descriptor has 256 bytes");
        return ds_ext::unpack(reinterpret_cast<const unsigned char*>(bytes.data()));
    });
    // The caller vouches for 256 bytes at the address: the memory belongs to a tensor that it holds.
    const auto at = [](std::uintptr_t address) { return reinterpret_cast<unsigned char*>(address); };
    m.def("pack_at", [at](const Descriptor& d, std::uintptr_t address) { ds_ext::pack(d, at(address)); });
    m.def("unpack_at", [at](std::uintptr_t address) { return ds_ext::unpack(at(address)); });
    m.def("sealed_at", [at](std::uintptr_t address) { return ds_ext::sealed(at(address)); });
    ds_ext::bind_links(m);
    ds_ext::bind_shm(m);
    ds_ext::bind_tcp(m);
    ds_ext::bind_rdma(m);
}
