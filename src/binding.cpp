// The Python module _C: plain numbers in, exceptions out. No torch header, so that one build serves every torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

#include "attention_params.h"
#include "backward/config.h"
#include "backward/params.h"
#include "backward_wide/config.h"
#include "beside/params.h"
#include "beside/rope_params.h"
#include "binding.h"
#include "build_config.h"  // generated
#include "config.h"
#include "helpers/params.h"
#include "wide/config.h"

#if CUTLASS_FMHA_CUDA
#include <cuda_runtime.h>

#include "backward/launch.h"
#include "beside/launch.h"
#include "beside/rope_launch.h"
#include "device_guard.h"
#include "helpers/launch.h"
#include "host_model.h"
#include "launch.h"
#endif

namespace py = pybind11;

namespace cutlass_fmha {
namespace {

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
  info["ptx_compiler"] = CUTLASS_FMHA_PTX_COMPILER;
  info["emulation"] = bool(CUTLASS_FMHA_EMULATION);
  info["mma_passes"] = CUTLASS_FMHA_MMA_PASSES;
  info["simulator"] = CUTLASS_FMHA_SIMULATOR;
  return info;
}

#if CUTLASS_FMHA_CUDA

/// Python's view of a row: a copy, with its number.
struct RowView : Row {
  int index;
};

/// The rows of which configuration, in their order.
template <class... Configs>
std::vector<RowView> views() {
  std::vector<RowView> found;
  for (Row const& row : rows()) {
    int const number = static_cast<int>(&row - rows().data());
    if ((... || std::holds_alternative<Configs>(row.config))) found.push_back({row, number});
  }
  return found;
}

/// `params` by value: another thread may write to the Python object while this one launches.
template <class Params>
void run(int row, Params params, int device, uintptr_t stream) {
  // A full launch queue makes the driver wait, maybe for a host callback that wants the interpreter.
  py::gil_scoped_release unlocked;
  launch_checked(row_at(row), params, device, reinterpret_cast<cudaStream_t>(stream));
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

struct RowView {
  int index;
  char const* name;
  std::variant<ForwardConfig, WideConfig, WideScoredConfig, BackwardConfig, QueryProductConfig, WideBackwardConfig,
               HelperConfig>
      config;
  int smem_bytes;
};
struct NoDeviceProperties {
  char const* name = "";
  int major = 0, minor = 0, multiProcessorCount = 0, l2CacheSize = 0;
  size_t sharedMemPerBlockOptin = 0;
};
using cudaDeviceProp = NoDeviceProperties;

template <class... Configs>
std::vector<RowView> views() {
  return {};
}

template <class Params>
void check_params(Params const& p) {
  if constexpr (std::is_base_of_v<AttentionParams, Params>) {
    check(p, bytes_of(DType::float16));
  } else {
    check(p);
  }
}

template <class Params>
void run(int, Params const& params, int, uintptr_t) {
  check_params(params);
  no_cuda();
}
int driver_version() { return 0; }
int device_count() { return 0; }
cudaDeviceProp device_properties(int) { no_cuda(); }

#endif

/// A field that the configurations of some families have: of another row, Python finds no such attribute.
template <class Get>
void attribute(py::class_<RowView>& c, char const* name, Get get) {
  c.def_property_readonly(name, [=](RowView const& row) -> py::object {
    return std::visit(
        [&](auto const& config) -> py::object {
          if constexpr (std::is_invocable_v<Get, decltype(config)>) return py::cast(get(config));
          throw py::attribute_error(std::string(row.name) + " has no " + name);
        },
        row.config);
  });
}

void bind_rows(py::module_& m) {
  py::class_<RowView> c(m, "Row");
  c.def_readonly("index", &RowView::index);
  c.def_property_readonly("name", [](RowView const& row) { return row.name; });
  c.def_readonly("smem_bytes", &RowView::smem_bytes);
  c.def("__repr__", [](RowView const& row) { return "<Row " + std::string(row.name) + ">"; });

  attribute(c, "family", [](auto const& config) { return name_of(config.family()); });
  attribute(c, "arch", [](auto const& config) { return config.arch; });
  attribute(c, "dtype", [](auto const& config) { return name_of(config.dtype); });
  attribute(c, "threads", [](auto const& config) { return config.threads(); });
  attribute(c, "dependent_launch", [](auto const& config) { return config.dependent_launch; });

  attribute(c, "head_dim", [](TileConfig const& config) { return config.head_dim; });
  attribute(c, "tile_m", [](TileConfig const& config) { return config.tile_m; });
  attribute(c, "tile_n", [](TileConfig const& config) { return config.tile_n; });
  attribute(c, "warps", [](TileConfig const& config) { return config.warps; });
  attribute(c, "min_blocks", [](TileConfig const& config) { return config.min_blocks; });
  attribute(c, "mma", [](TileConfig const& config) { return name_of(config.mma); });
  attribute(c, "head_dim_v", [](auto const& config) -> decltype(config.head_dim_v()) { return config.head_dim_v(); });
  attribute(c, "alignment", [](auto const& config) -> decltype(config.alignment()) { return config.alignment(); });
  attribute(c, "takes_features",
            [](auto const& config) -> decltype(config.takes_features()) { return config.takes_features(); });
  attribute(c, "scored", [](auto const& config) -> decltype(config.scored()) { return config.scored(); });
  attribute(c, "element_bytes", [](TileConfig const& config) { return config.element_bytes(); });

  attribute(c, "kv_warps", [](auto const& config) -> decltype(config.kv_warps + 0) { return config.kv_warps; });
  attribute(c, "stages", [](auto const& config) -> decltype(config.stages + 0) { return config.stages; });
  attribute(c, "q_in_registers", [](ForwardConfig const& config) { return config.q_in_registers; });
  attribute(c, "ping_pong", [](ForwardConfig const& config) { return config.ping_pong; });
  attribute(c, "copy", [](ForwardConfig const& config) { return name_of(config.copy); });

  attribute(c, "reads_mask_bytes", [](ForwardConfig const& config) { return reads_mask(config).bytes; });
  attribute(c, "reads_mask_bits", [](ForwardConfig const& config) { return reads_mask(config).bits; });
  c.def(
      "mask_words",
      [](RowView const& row, AttentionParams const& p) -> int64_t {
        auto const* const config = std::get_if<ForwardConfig>(&row.config);
        return config && config->reads_masks() && reads_mask(*config).bits ? mask_bits(p, *config).words() : 0;
      },
      py::arg("params"));

  attribute(c, "chunk", [](BackwardConfig const& config) { return config.chunk; });
  attribute(c, "groups", [](BackwardConfig const& config) { return config.groups; });
  attribute(c, "tail", [](BackwardConfig const& config) { return config.tail; });
  attribute(c, "writes_scores", [](BackwardConfig const& config) { return config.writes_scores; });

  attribute(c, "accumulates", [](WideConfig const& config) { return config.accumulates(); });
  attribute(c, "example", [](WideConfig const& config) { return config.example(); });
}

void bind_device(py::module_& m) {
  py::class_<cudaDeviceProp>(m, "DeviceProperties")
      .def_property_readonly("name", [](cudaDeviceProp const& p) { return std::string(p.name); })
      .def_property_readonly("major", [](cudaDeviceProp const& p) { return p.major; })
      .def_property_readonly("minor", [](cudaDeviceProp const& p) { return p.minor; })
      .def_property_readonly("multiprocessor_count", [](cudaDeviceProp const& p) { return p.multiProcessorCount; })
      .def_property_readonly("shared_memory_per_block_optin",
                             [](cudaDeviceProp const& p) { return p.sharedMemPerBlockOptin; })
      .def_property_readonly("l2_cache_size", [](cudaDeviceProp const& p) { return p.l2CacheSize; });
  m.def("device_count", &device_count);
  m.def("device_properties", &device_properties, py::arg("device"));
  m.def("driver_version", &driver_version);
}

template <class Params>
void bind_run(py::module_& m) {
  m.def("run", &run<Params>, py::arg("row"), py::arg("params"), py::arg("device"), py::arg("stream"));
}

/// run() for one call of a plan: its parameters never become an object.
void launch_planned(int row, AttentionParams const& plan, int device, uintptr_t stream, uintptr_t q, uintptr_t k,
                    uintptr_t v, uintptr_t o, uintptr_t lse, double scale, uintptr_t room) {
  run(row, of_call(plan, q, k, v, o, lse, scale, room), device, stream);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "The compiled extension: a table of kernels, one way to launch them, and the device's properties.";

  bind_rows(m);
  bind_device(m);
  bind_attention_params(m);
  bind_backward_params(m);
  bind_helper_params(m);
  bind_rope_params(m);
  bind_beside_params(m);
  bind_arrays(m);
  bind_xla(m);
  m.def("rows", [] { return views<ForwardConfig, WideConfig, WideScoredConfig>(); });
  m.def("backward_rows", [] { return views<BackwardConfig, QueryProductConfig, WideBackwardConfig>(); });
  m.def("helpers", [] { return views<HelperConfig>(); });
  bind_run<BackwardParams>(m);  // before what it is derived from
  bind_run<AttentionParams>(m);
  bind_run<CombineParams>(m);
  bind_run<MergeParams>(m);
  bind_run<RotaryParams>(m);
  bind_run<AppendParams>(m);
  bind_run<RopeBackwardParams>(m);  // before what it is derived from
  bind_run<RopeParams>(m);
  bind_run<RmsNormParams>(m);
  bind_run<RmsNormBackwardParams>(m);
  bind_run<GatedBackwardParams>(m);  // before what it is derived from
  bind_run<GatedParams>(m);
  m.def("launch", &launch_planned, py::arg("row"), py::arg("plan"), py::arg("device"), py::arg("stream"), py::arg("q"),
        py::arg("k"), py::arg("v"), py::arg("o"), py::arg("lse"), py::arg("scale"), py::arg("room"));
  m.def("build_info", &build_info);
#if CUTLASS_FMHA_CUDA
  bind_host_model(m);
#endif
}

}  // namespace cutlass_fmha
