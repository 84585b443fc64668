// The Python module _C: plain numbers in, exceptions out. No torch header, so that one build serves every torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cmath>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "binding.h"
#include "build_config.h"  // generated
#include "config.h"
#include "fallback/binding.h"
#include "forward/scheduler.h"
#include "params.h"
#include "support/binding.h"

#if CUTLASS_FMHA_CUDA
#include <cuda_runtime.h>

#include "host_model.h"
#include "registry.h"
#endif

namespace py = pybind11;

namespace cutlass_fmha {
namespace {

using Pointers = std::array<uintptr_t, 5>;   // q, k, v, o, lse
using Sizes = std::array<int64_t, 5>;        // batch, seqlen_q, seqlen_k, num_heads, num_heads_kv
using StrideList = std::array<int64_t, 12>;  // (batch, seqlen, head) of q, k, v, o
using TailNumbers = std::array<int64_t, 5>;  // address of its memory; tiles, parts, first, rest: see Tail

ForwardParams make_params(Pointers const& pointers, Sizes const& sizes, StrideList const& s, double scale,
                          std::optional<int64_t> diagonal) {
  static constexpr char const* kNames[] = {"batch", "seqlen_q", "seqlen_k", "num_heads", "num_heads_kv"};
  for (size_t i = 0; i < sizes.size(); ++i) {
    require(sizes[i] >= 0 && sizes[i] <= kMaxSeqlen, [&] {
      return std::string(kNames[i]) + " must be between 0 and " + std::to_string(kMaxSeqlen) + ", got " +
             std::to_string(sizes[i]);
    });
  }
  require(sizes[4] > 0 ? sizes[3] % sizes[4] == 0 : sizes[3] == 0, [&] {
    return "num_heads (" + std::to_string(sizes[3]) + ") must be a multiple of num_heads_kv (" +
           std::to_string(sizes[4]) + ")";
  });
  require(std::isfinite(scale) && std::fabs(scale) <= 2e38,
          [&] { return "scale must be a finite float of at most 2e38, got " + std::to_string(scale); });
  if (diagonal) {
    require(std::llabs(*diagonal) <= kMaxSeqlen,
            [&] { return "diagonal must be between -2**29 and 2**29, got " + std::to_string(*diagonal); });
  }
  ForwardParams p{};
  p.q = reinterpret_cast<void const*>(pointers[0]);
  p.k = reinterpret_cast<void const*>(pointers[1]);
  p.v = reinterpret_cast<void const*>(pointers[2]);
  p.o = reinterpret_cast<void*>(pointers[3]);
  p.lse = reinterpret_cast<float*>(pointers[4]);
  p.batch = static_cast<int>(sizes[0]);
  p.seqlen_q = static_cast<int>(sizes[1]);
  p.seqlen_k = static_cast<int>(sizes[2]);
  p.num_heads = static_cast<int>(sizes[3]);
  p.num_heads_kv = static_cast<int>(sizes[4]);
  p.q_stride = {s[0], s[1], s[2]};
  p.k_stride = {s[3], s[4], s[5]};
  p.v_stride = {s[6], s[7], s[8]};
  p.o_stride = {s[9], s[10], s[11]};
  p.diagonal = diagonal ? static_cast<int>(*diagonal) : kNoDiagonal;
  set_scale(p, static_cast<float>(scale));
  return p;
}

py::dict build_info() {
  py::dict info;
  info["cuda"] = bool(CUTLASS_FMHA_CUDA);
  info["cuda_version"] = CUTLASS_FMHA_CUDA_VERSION;
  info["nvcc_version"] = CUTLASS_FMHA_NVCC_VERSION;
  info["cutlass_version"] = CUTLASS_FMHA_CUTLASS_VERSION;
  info["source_hash"] = CUTLASS_FMHA_SOURCE_HASH;
  info["architectures"] = std::vector<int>(CUTLASS_FMHA_ARCHITECTURES);
  py::dict proxy;
  for (int arch : CUTLASS_FMHA_PROXIED) proxy[py::int_(arch)] = 90;
  info["proxy"] = proxy;
  py::dict compiled_for;
  for (auto const& [arch, target] : CUTLASS_FMHA_COMPILED_FOR) compiled_for[py::int_(arch)] = target;
  info["compiled_for"] = compiled_for;
  info["emulation"] = bool(CUTLASS_FMHA_EMULATION);
  info["mma_passes"] = CUTLASS_FMHA_MMA_PASSES;
  info["simulator"] = CUTLASS_FMHA_SIMULATOR;
  return info;
}

#if CUTLASS_FMHA_CUDA

/// Python's view of a registry row: a copy, with its row number.
struct TemplateRow : Template {
  int index;
};

void check_aligned(Template const& t, Pointers const& pointers, Sizes const& sizes, StrideList const& strides) {
  int const bytes = t.config.alignment();
  for (int i = 0; i < 4; ++i) {
    require(pointers[i] % bytes == 0, [&] {
      return std::string(t.name) + " needs pointers aligned to " + std::to_string(bytes) + " bytes, and that of " +
             "qkvo"[i] + " is not";
    });
    // batch, seqlen, heads of the operand: the stride of a dimension of size 1 is never used.
    int64_t const extent[] = {sizes[0], i == 0 || i == 3 ? sizes[1] : sizes[2], i == 0 || i == 3 ? sizes[3] : sizes[4]};
    for (int d = 0; d < 3; ++d) {
      require(extent[d] <= 1 || strides[3 * i + d] * 2 % bytes == 0, [&] {
        return std::string(t.name) + " needs strides that are multiples of " + std::to_string(bytes) +
               " bytes, and a stride of " + "qkvo"[i] + " is not";
      });
    }
  }
}

/// The tail that a caller wants, whose memory is at `numbers[0]`.
Tail make_tail(Template const& t, TailNumbers const& numbers, ForwardParams const& p) {
  Tail tail;
  auto const [memory, tiles, parts, first, rest] = numbers;
  int64_t const all = grid_size(p, t.config.tile_m), key_blocks = ceil_div(p.seqlen_k, t.config.tile_n);
  require(t.config.copy == Copy::tma && t.config.kv_warps == 1 && p.diagonal == kNoDiagonal,
          [&] { return std::string(t.name) + " has no tail here: rows that copy by TMA have one, without a mask"; });
  int64_t const last = key_blocks - first - (parts - 2) * rest;
  require(memory > 0 && memory % 16 == 0 && tiles > 0 && tiles <= all && parts > 1 && parts <= 64 && first > 0 &&
              first < key_blocks && rest > 0 && rest < key_blocks && last > 0 && last <= rest &&
              tiles * parts * t.config.tile_m * (t.config.head_dim / 4) <= INT_MAX,
          [&] {
            return std::string(t.name) + " can't divide " + std::to_string(tiles) + " of " + std::to_string(all) +
                   " tiles into a part of " + std::to_string(first) + " and " + std::to_string(parts - 1) + " of " +
                   std::to_string(rest) + " of " + std::to_string(key_blocks) + " key blocks";
          });
  tail.begin = int(all - tiles);
  tail.tiles = int(tiles);
  tail.parts = int(parts);
  tail.first = int(first);
  tail.rest = int(rest);
  tail.by_rest = Divisor(tail.parts - 1);
  int64_t const rows = tiles * parts * t.config.tile_m;
  tail.o = reinterpret_cast<float*>(static_cast<uintptr_t>(memory));
  tail.maxima = tail.o + rows * t.config.head_dim;
  tail.sums = tail.maxima + rows;
  return tail;
}

void run(int row, Pointers const& pointers, Sizes const& sizes, StrideList const& strides, double scale,
         std::optional<int64_t> diagonal, int device, uintptr_t stream, std::optional<TailNumbers> const& tail) {
  auto const& rows = templates();
  require(row >= 0 && row < static_cast<int>(rows.size()), [&] {
    return "row must be between 0 and " + std::to_string(rows.size() - 1) + ", got " + std::to_string(row);
  });
  require(!rows[row].config.general,
          [&] { return std::string(rows[row].name) + " is a general row: run_general launches it"; });
  ForwardParams const params = make_params(pointers, sizes, strides, scale, diagonal);
  check_aligned(rows[row], pointers, sizes, strides);
  Tail const divided = tail ? make_tail(rows[row], *tail, params) : Tail{};
  // A full launch queue makes the driver wait, maybe for a host callback that wants the interpreter.
  py::gil_scoped_release unlocked;
  launch_forward(row, params, divided, device, reinterpret_cast<cudaStream_t>(stream));
}

int driver_version() {
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}

int device_count() {
  int count = 0;
  cudaError_t const status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess) return count;
  cudaGetLastError();
  // Without libcuda the driver's version reads 0, and the runtime reports it as too old as well.
  if (status == cudaErrorInsufficientDriver && driver_version() > 0) {
    throw std::runtime_error("the NVIDIA driver is too old: it supports CUDA " +
                             std::to_string(driver_version() / 1000) + "." +
                             std::to_string(driver_version() % 1000 / 10) +
                             ", and this build of cutlass_fmha needs CUDA " CUTLASS_FMHA_CUDA_VERSION
                             " (driver " CUTLASS_FMHA_DRIVER_FLOOR " or newer)");
  }
  if (status == cudaErrorNoDevice || status == cudaErrorInsufficientDriver) return 0;
  throw std::runtime_error(std::string("cudaGetDeviceCount failed: ") + cudaGetErrorString(status));
}

cudaDeviceProp device_properties(int device) {
  int const count = device_count();
  require(device >= 0 && device < count, [&] {
    return "device must be one of the " + std::to_string(count) + " CUDA devices here, got " + std::to_string(device);
  });
  cudaDeviceProp properties{};
  cudaError_t const status = cudaGetDeviceProperties(&properties, device);
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string("cudaGetDeviceProperties failed: ") + cudaGetErrorString(status));
  }
  return properties;
}

#else

struct TemplateRow {
  int index;
  char const* name;
  ForwardConfig config;
  int smem_bytes;
};
struct NoDeviceProperties {
  char const* name = "";
  int major = 0, minor = 0, multiProcessorCount = 0, l2CacheSize = 0;
  size_t sharedMemPerBlockOptin = 0;
};
using cudaDeviceProp = NoDeviceProperties;

void run(int, Pointers const& pointers, Sizes const& sizes, StrideList const& strides, double scale,
         std::optional<int64_t> diagonal, int, uintptr_t, std::optional<TailNumbers> const&) {
  make_params(pointers, sizes, strides, scale, diagonal);
  no_cuda();
}
int driver_version() { return 0; }
int device_count() { return 0; }
cudaDeviceProp device_properties(int) { no_cuda(); }

#endif

char const* name_of(Copy copy) {
  switch (copy) {
    case Copy::cp_async_16:
      return "cp_async_16";
    case Copy::element:
      return "element";
    case Copy::tma:
      return "tma";
    case Copy::ldg_16:
      return "ldg_16";
  }
  return "";
}

std::vector<TemplateRow> template_rows() {
  std::vector<TemplateRow> rows;
#if CUTLASS_FMHA_CUDA
  for (Template const& t : templates()) rows.push_back({t, static_cast<int>(rows.size())});
#endif
  return rows;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "The compiled extension: a table of kernels, one way to launch them, and the device's properties.";

  py::class_<TemplateRow>(m, "Template")
      .def_readonly("index", &TemplateRow::index)
      .def_property_readonly("name", [](TemplateRow const& t) { return t.name; })
      .def_readonly("smem_bytes", &TemplateRow::smem_bytes)
      .def_property_readonly("arch", [](TemplateRow const& t) { return t.config.arch; })
      .def_property_readonly(
          "dtype", [](TemplateRow const& t) { return t.config.dtype == DType::float16 ? "float16" : "bfloat16"; })
      .def_property_readonly("head_dim", [](TemplateRow const& t) { return t.config.head_dim; })
      .def_property_readonly("head_dim_v", [](TemplateRow const& t) { return t.config.head_dim_v(); })
      .def_property_readonly("tile_m", [](TemplateRow const& t) { return t.config.tile_m; })
      .def_property_readonly("tile_n", [](TemplateRow const& t) { return t.config.tile_n; })
      .def_property_readonly("warps", [](TemplateRow const& t) { return t.config.warps; })
      .def_property_readonly("kv_warps", [](TemplateRow const& t) { return t.config.kv_warps; })
      .def_property_readonly("stages", [](TemplateRow const& t) { return t.config.stages; })
      .def_property_readonly("min_blocks", [](TemplateRow const& t) { return t.config.min_blocks; })
      .def_property_readonly("q_in_registers", [](TemplateRow const& t) { return t.config.q_in_registers; })
      .def_property_readonly("ping_pong", [](TemplateRow const& t) { return t.config.ping_pong; })
      .def_property_readonly("copy", [](TemplateRow const& t) { return name_of(t.config.copy); })
      .def_property_readonly("dependent_launch", [](TemplateRow const& t) { return t.config.dependent_launch; })
      .def_property_readonly("general", [](TemplateRow const& t) { return t.config.general; })
      .def_property_readonly("alignment", [](TemplateRow const& t) { return t.config.alignment(); })
      .def("__repr__", [](TemplateRow const& t) { return "<Template " + std::string(t.name) + ">"; });

  py::class_<cudaDeviceProp>(m, "DeviceProperties")
      .def_property_readonly("name", [](cudaDeviceProp const& p) { return std::string(p.name); })
      .def_property_readonly("major", [](cudaDeviceProp const& p) { return p.major; })
      .def_property_readonly("minor", [](cudaDeviceProp const& p) { return p.minor; })
      .def_property_readonly("multiprocessor_count", [](cudaDeviceProp const& p) { return p.multiProcessorCount; })
      .def_property_readonly("shared_memory_per_block_optin",
                             [](cudaDeviceProp const& p) { return p.sharedMemPerBlockOptin; })
      .def_property_readonly("l2_cache_size", [](cudaDeviceProp const& p) { return p.l2CacheSize; });

  m.def("templates", &template_rows);
  m.def("run", &run, py::arg("row"), py::arg("pointers"), py::arg("sizes"), py::arg("strides"), py::arg("scale"),
        py::arg("diagonal"), py::arg("device"), py::arg("stream"), py::arg("tail") = py::none());
  m.def("device_count", &device_count);
  m.def("device_properties", &device_properties, py::arg("device"));
  m.def("driver_version", &driver_version);
  m.def("build_info", &build_info);
  bind_general(m);
  bind_support(m);
  bind_fallback(m);
#if CUTLASS_FMHA_CUDA
  bind_host_model(m);
#endif
}

}  // namespace cutlass_fmha
