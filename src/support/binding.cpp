#include "binding.h"

#include <pybind11/stl.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "../binding.h"
#include "params.h"

#if CUTLASS_FMHA_CUDA
#include "launch.h"
#endif

namespace py = pybind11;

namespace cutlass_fmha {
namespace {

template <size_t Count>
using Numbers = std::array<int64_t, Count>;
using Address = uintptr_t;

/// (dtype, arch, device, stream): which kernel, and where it runs.
using Target = std::tuple<std::string, int, int, Address>;
/// ((cos, sin), (cos stride, sin stride, positions, dim), (interleaved, float32))
using RotaryTuple = std::tuple<std::array<Address, 2>, Numbers<4>, std::array<bool, 2>>;

template <class Pointer>
void set(Pointer& field, Address address) {
  field = reinterpret_cast<Pointer>(address);
}

int size_of(char const* name, int64_t value, int64_t least = 0) {
  require(value >= least && value <= kMaxSeqlen, [&] {
    return std::string(name) + " must be between " + std::to_string(least) + " and " + std::to_string(kMaxSeqlen) +
           ", got " + std::to_string(value);
  });
  return static_cast<int>(value);
}

/// Three of a list's strides, from number `first` on: (batch, seqlen, head).
template <size_t Count>
Strides strides_of(Numbers<Count> const& values, size_t first) {
  return {values[first], values[first + 1], values[first + 2]};
}

Element element_named(std::string const& dtype) {
  for (int i = 0; i < kElements; ++i) {
    if (dtype == name_of(Element(i))) return Element(i);
  }
  throw std::invalid_argument("dtype must be float16, bfloat16 or float32, got " + dtype);
}

Rotary rotary_of(std::optional<RotaryTuple> const& given, int head_dim) {
  Rotary rotary{};
  if (!given) return rotary;
  auto const& [tables, numbers, flags] = *given;
  set(rotary.cos, tables[0]);
  set(rotary.sin, tables[1]);
  rotary.cos_stride = numbers[0];
  rotary.sin_stride = numbers[1];
  rotary.positions = size_of("positions of cos and sin", numbers[2]);
  rotary.dim = size_of("rotary dim", numbers[3]);
  require(rotary.dim % 2 == 0 && rotary.dim <= head_dim, [&] {
    return "rotary dim must be even and at most head_dim " + std::to_string(head_dim) + ", got " +
           std::to_string(rotary.dim);
  });
  rotary.interleaved = flags[0];
  rotary.float32 = flags[1];
  return rotary;
}

#if CUTLASS_FMHA_CUDA
template <class Params>
using Launch = void (*)(Params const&, Element, int arch, int device, cudaStream_t);

template <class Params>
void run(Launch<Params> launch, Params const& params, Target const& target) {
  auto const& [dtype, arch, device, stream] = target;
  Element const element = element_named(dtype);
  // A full launch queue makes the driver wait, maybe for a host callback that wants the interpreter.
  py::gil_scoped_release unlocked;
  launch(params, element, arch, device, reinterpret_cast<cudaStream_t>(stream));
}
#else
constexpr char launch_combine{}, launch_merge{}, launch_append{}, launch_rotary{};  // names to say, nothing to call

template <class Params>
void run(void const*, Params const&, Target const& target) {
  element_named(std::get<0>(target));
  no_cuda();
}
#endif

void combine(std::array<Address, 5> const& pointers, Numbers<5> const& sizes, Numbers<6> const& strides,
             Target const& target) {
  CombineParams p{};
  set(p.partial_o, pointers[0]);
  set(p.partial_lse, pointers[1]);
  set(p.partial_low, pointers[2]);
  set(p.o, pointers[3]);
  set(p.lse, pointers[4]);
  p.batch = size_of("batch", sizes[0]);
  p.seqlen_q = size_of("seqlen_q", sizes[1]);
  p.num_heads = size_of("num_heads", sizes[2]);
  p.head_dim_v = size_of("head_dim_v", sizes[3]);
  p.splits = size_of("splits", sizes[4]);
  p.o_stride = strides_of(strides, 0);
  p.lse_batch_stride = strides[3];
  p.lse_head_stride = strides[4];
  p.lse_rows = strides[5];
  run(&launch_combine, p, target);
}

void merge_states(std::array<Address, 6> const& pointers, Numbers<4> const& sizes, Numbers<18> const& strides,
                  Target const& target) {
  MergeParams p{};
  set(p.o_a, pointers[0]);
  set(p.o_b, pointers[1]);
  set(p.o, pointers[2]);
  set(p.lse_a, pointers[3]);
  set(p.lse_b, pointers[4]);
  set(p.lse, pointers[5]);
  p.batch = size_of("batch", sizes[0]);
  p.seqlen_q = size_of("seqlen_q", sizes[1]);
  p.num_heads = size_of("num_heads", sizes[2]);
  p.head_dim_v = size_of("head_dim_v", sizes[3]);
  p.o_a_stride = strides_of(strides, 0);
  p.o_b_stride = strides_of(strides, 3);
  p.o_stride = strides_of(strides, 6);
  p.lse_a_stride = {strides[9], strides[10], strides[11]};
  p.lse_b_stride = {strides[12], strides[13], strides[14]};
  p.lse_stride = {strides[15], strides[16], strides[17]};
  run(&launch_merge, p, target);
}

/// x, out, and the positions' two vectors; batch, seqlen, num_heads, head_dim; strides of x and out.
RotaryParams rotary_params(std::array<Address, 4> const& pointers, Numbers<4> const& sizes, Numbers<6> const& strides,
                           bool advance, RotaryTuple const& rotary) {
  RotaryParams p{};
  set(p.x, pointers[0]);
  set(p.out, pointers[1]);
  set(p.position.first, pointers[2]);
  set(p.position.before, pointers[3]);
  p.batch = size_of("batch", sizes[0]);
  p.seqlen = size_of("seqlen", sizes[1]);
  p.num_heads = size_of("num_heads", sizes[2]);
  p.head_dim = size_of("head_dim", sizes[3]);
  p.x_stride = strides_of(strides, 0);
  p.out_stride = strides_of(strides, 3);
  p.advance = advance;
  p.rotary = rotary_of(rotary, p.head_dim);
  return p;
}

void rotary(std::array<Address, 4> const& pointers, Numbers<4> const& sizes, Numbers<6> const& strides, bool advance,
            RotaryTuple const& rotary, Target const& target) {
  run(&launch_rotary, rotary_params(pointers, sizes, strides, advance, rotary), target);
}

/// The first four arguments of rotary(): queries that are rotated in the launch that appends.
using Query = std::tuple<std::array<Address, 4>, Numbers<4>, Numbers<6>, bool>;

void append_kv(std::array<Address, 10> const& pointers, Numbers<8> const& sizes, Numbers<13> const& strides,
               std::optional<RotaryTuple> const& rotary, std::optional<Query> const& query, Target const& target) {
  AppendParams p{};
  set(p.k_cache, pointers[0]);
  set(p.v_cache, pointers[1]);
  set(p.k, pointers[2]);
  set(p.v, pointers[3]);
  set(p.cache_seqlens, pointers[4]);
  set(p.cache_batch_idx, pointers[5]);
  set(p.page_table, pointers[6]);
  set(p.seqused_k, pointers[7]);
  set(p.position.first, pointers[8]);
  set(p.position.before, pointers[9]);
  p.batch = size_of("batch", sizes[0]);
  p.seqlen_new = size_of("seqlen_new", sizes[1]);
  p.num_heads_kv = size_of("num_heads_kv", sizes[2]);
  p.head_dim = size_of("head_dim", sizes[3]);
  p.head_dim_v = size_of("head_dim_v", sizes[4]);
  p.entries = size_of("entries of the cache", sizes[5]);
  p.capacity = size_of("capacity", sizes[6]);
  p.page_size = size_of("page_size", sizes[7], p.page_table ? 1 : 0);
  p.k_cache_stride = strides_of(strides, 0);
  p.v_cache_stride = strides_of(strides, 3);
  p.k_stride = strides_of(strides, 6);
  p.v_stride = strides_of(strides, 9);
  p.page_table_stride = strides[12];
  p.rotary = rotary_of(rotary, p.head_dim);
  require(!query || rotary, [] { return "a query is rotated where keys are: rotary is None"; });
  if (query) {
    auto const& [query_pointers, query_sizes, query_strides, advance] = *query;
    p.query = rotary_params(query_pointers, query_sizes, query_strides, advance, *rotary);
  }
  run(&launch_append, p, target);
}

std::vector<SupportKernel> kernels() {
#if CUTLASS_FMHA_CUDA
  return support_kernels();
#else
  return {};
#endif
}

}  // namespace

void bind_support(py::module_& m) {
  py::class_<SupportKernel>(m, "SupportKernel")
      .def_property_readonly("name", [](SupportKernel const& k) { return k.name; })
      .def_property_readonly("kind", [](SupportKernel const& k) { return name_of(k.kind); })
      .def_property_readonly("arch", [](SupportKernel const& k) { return k.arch; })
      .def_property_readonly("dtype", [](SupportKernel const& k) { return name_of(k.element); })
      .def_property_readonly("threads", [](SupportKernel const&) { return kSupportThreads; })
      .def("__repr__", [](SupportKernel const& k) { return "<SupportKernel " + std::string(k.name) + ">"; });

  m.def("support_kernels", &kernels);
  m.def("combine", &combine, py::arg("pointers"), py::arg("sizes"), py::arg("strides"), py::arg("target"));
  m.def("merge_states", &merge_states, py::arg("pointers"), py::arg("sizes"), py::arg("strides"), py::arg("target"));
  m.def("append_kv", &append_kv, py::arg("pointers"), py::arg("sizes"), py::arg("strides"), py::arg("rotary"),
        py::arg("query"), py::arg("target"));
  m.def("rotary", &rotary, py::arg("pointers"), py::arg("sizes"), py::arg("strides"), py::arg("advance"),
        py::arg("rotary"), py::arg("target"));
}

}  // namespace cutlass_fmha
