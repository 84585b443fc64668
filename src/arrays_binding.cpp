// What arrays of other libraries say of themselves in capsules of DLPack, read without a tensor of any of them:
// https://dmlc.github.io/dlpack/latest/c_api.html. A capsule is not taken: it keeps its array until it is forgotten.
#include <array>
#include <cstring>
#include <type_traits>

#include "binding.h"

namespace py = pybind11;

namespace cutlass_fmha {
namespace {

constexpr int kMaxDims = 4;
constexpr uintptr_t kAlignment = 16;  // the bits of an address below decide which rows are aligned

struct Device {
  int32_t type;
  int32_t index;
};

struct Type {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

/// What a capsule named "dltensor" begins with.
struct Array {
  void* data;
  Device device;
  int32_t dims;
  Type type;
  int64_t const* shape;
  int64_t const* strides;  // in elements; null: contiguous
  uint64_t byte_offset;
};

/// What plans differ by.
struct Metadata {
  Device device;
  int32_t dims;
  Type type;
  std::array<int64_t, kMaxDims> shape;
  std::array<int64_t, kMaxDims> strides;
};

struct Call {
  std::array<Metadata, 3> of;
  uintptr_t misaligned;
};
static_assert(std::has_unique_object_representations_v<Call>, "bytes without a meaning would make keys differ");

Metadata metadata(Array const& array) {
  Metadata found{array.device, array.dims, array.type, {}, {}};
  int64_t contiguous = 1;
  for (int i = array.dims - 1; i >= 0; --i) {
    found.shape[i] = array.shape[i];
    found.strides[i] = array.strides ? array.strides[i] : contiguous;
    contiguous *= array.shape[i];
  }
  return found;
}

/// Bytes that are equal where a plan is, and the addresses of q, k and v; None of what is read in another way.
py::object array_metadata(py::handle q, py::handle k, py::handle v) {
  Call call{};
  std::array<uintptr_t, 3> addresses{};
  for (int i = 0; py::handle const capsule : {q, k, v}) {
    if (!PyCapsule_IsValid(capsule.ptr(), "dltensor")) return py::none();
    auto const& array = *static_cast<Array const*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
    if (array.dims < 0 || array.dims > kMaxDims) return py::none();
    addresses[i] = reinterpret_cast<uintptr_t>(array.data) + array.byte_offset;
    call.of[i++] = metadata(array);
  }
  call.misaligned = (addresses[0] | addresses[1] | addresses[2]) % kAlignment;
  return py::make_tuple(py::bytes(reinterpret_cast<char const*>(&call), sizeof(call)), addresses[0], addresses[1],
                        addresses[2]);
}

}  // namespace

void bind_arrays(py::module_& m) { m.def("array_metadata", &array_metadata, py::arg("q"), py::arg("k"), py::arg("v")); }

}  // namespace cutlass_fmha
