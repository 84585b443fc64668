// What XLA calls, by its foreign function interface (xla/ffi/api/c_api.h, of which a struct here ends with the last
// field that is read; XLA only adds behind): a launch that Python described once is repeated without the interpreter,
// anything else is run by Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "attention_params.h"
#include "binding.h"

#if CUTLASS_FMHA_CUDA
#include "device_guard.h"
#include "launch.h"
#endif

namespace py = pybind11;

namespace cutlass_fmha {
namespace {

constexpr int kMajor = 0, kMinor = 1;  // of the interface
constexpr int kInvalidArgument = 3;
constexpr int kMetadata = 1;  // the extension that asks a handler what it is

struct Error;
struct Context;

struct Extension {
  size_t size;
  int type;
  Extension* next;
};

struct Metadata {
  size_t size;
  struct {
    size_t size;
    Extension* extension;
    int major, minor;
  } version;
  uint32_t traits;
};

struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

struct Buffer {
  size_t size;
  Extension* extension;
  int type;
  void* data;
};

struct Buffers {
  size_t size;
  Extension* extension;
  int64_t count;
  int const* types;
  Buffer const* const* buffers;
};

struct Text {
  char const* data;
  size_t size;
};

struct Attributes {
  size_t size;
  Extension* extension;
  int64_t count;
  int const* types;
  Text const* const* names;
  Text const* const* values;
};

struct ErrorAsked {
  size_t size;
  Extension* extension;
  char const* message;
  int code;
};

/// Of a context a stream, or the number of a device.
template <class Found>
struct Asked {
  size_t size;
  Extension* extension;
  Context* context;
  Found found;
};

struct Api {
  size_t size;
  Extension* extension;
  struct {
    size_t size;
    Extension* extension;
    int major, minor;
  } version;
  void const* internal;
  Error* (*error_create)(ErrorAsked*);
  void (*others[3])();
  Error* (*stream_get)(Asked<void*>*);
  void (*more[12])();
  Error* (*device_ordinal_get)(Asked<int32_t>*);
};

struct Frame {
  size_t size;
  Extension* extension;
  Api const* api;
  Context* context;
  int stage;
  Buffers arguments, results;
  Attributes attributes;
};

using Addresses = std::vector<uintptr_t>;

Addresses addresses(Buffers const& buffers) {
  Addresses found(buffers.count);
  for (int64_t i = 0; i < buffers.count; ++i) found[i] = reinterpret_cast<uintptr_t>(buffers.buffers[i]->data);
  return found;
}

// ---- launches that are kept -----------------------------------------------------------------------------------------

/// A launch of attention: arguments are q, k, v and those of `places`; results o, with `lse` the LSE, with `room` that.
struct Launch {
  int row;
  AttentionParams params;
  double scale;
  bool lse, room;
  /// (number of an argument, what writes its address).
  std::vector<std::pair<size_t, SetAddress>> places;

  AttentionParams of(Addresses const& given, Addresses const& results) const {
    AttentionParams p = of_call(params, given[0], given[1], given[2], results[0], lse ? results[1] : 0, scale,
                                room ? results.back() : 0);
    for (auto const& [argument, set] : places) set(p, given.at(argument));
    return p;
  }
};

/// By what was said when a function was traced, and the device. As many as XLA has programs, which are larger.
class Launches {
 public:
  void keep(std::string const& text, int device, Launch launch) {
    auto kept = std::make_shared<Launch const>(std::move(launch));
    std::unique_lock<std::shared_mutex> const locked(mutex_);
    kept_[key(text, device)] = std::move(kept);
  }

  std::shared_ptr<Launch const> find(std::string_view text, int device) const {
    std::shared_lock<std::shared_mutex> const locked(mutex_);
    auto const found = kept_.find(key(text, device));
    return found == kept_.end() ? nullptr : found->second;
  }

 private:
  static std::string key(std::string_view text, int device) {
    return std::string(text).append(reinterpret_cast<char const*>(&device), sizeof(device));
  }

  mutable std::shared_mutex mutex_;
  std::unordered_map<std::string, std::shared_ptr<Launch const>> kept_;
};

Launches& launches() {
  static Launches& found = *new Launches;  // XLA's threads may outlive what a library destroys at exit
  return found;
}

/// False: that is Python's to run.
#if CUTLASS_FMHA_CUDA
bool repeat(std::string_view text, Addresses const& given, Addresses const& results, void* stream, int device) {
  constexpr uintptr_t kVector = 16;  // what launches are kept for
  auto const kept = launches().find(text, device);
  if (!kept || (given[0] | given[1] | given[2] | results[0]) % kVector) return false;
  launch_checked(row_at(kept->row), kept->of(given, results), device, static_cast<cudaStream_t>(stream));
  return true;
}
#else
bool repeat(std::string_view, Addresses const&, Addresses const&, void*, int) { return false; }
#endif

// ---- the handlers ---------------------------------------------------------------------------------------------------

/// run(text, arguments, results, stream, device) of Python's; stream and device are None on the host.
PyObject* python_run = nullptr;

/// True: repeat() knows it now.
bool run_by_python(std::string_view text, Addresses const& given, Addresses const& results, py::object stream,
                   py::object device) {
  py::object const said = py::reinterpret_borrow<py::object>(python_run)(py::bytes(text.data(), text.size()), given,
                                                                         results, stream, device);
  if (py::isinstance<py::str>(said)) throw std::runtime_error(said.cast<std::string>());
  return said.ptr() == Py_True;
}

template <class Found>
Found ask(Error* (*function)(Asked<Found>*), Context* context) {
  Asked<Found> asked{sizeof(asked), nullptr, context, {}};
  if (function(&asked)) throw std::runtime_error("XLA names no stream or no device");
  return asked.found;
}

template <bool cuda>
void execute(Frame const& frame) {
  Text const& said = *frame.attributes.values[0];
  std::string_view const text(said.data, said.size);
  Addresses const given = addresses(frame.arguments), results = addresses(frame.results);
  if constexpr (cuda) {
    void* const stream = ask(frame.api->stream_get, frame.context);
    int const device = ask(frame.api->device_ordinal_get, frame.context);
    if (repeat(text, given, results, stream, device)) return;
    bool const kept = [&] {
      py::gil_scoped_acquire const locked;
      return run_by_python(text, given, results, py::int_(reinterpret_cast<uintptr_t>(stream)), py::int_(device));
    }();
    if (kept && !repeat(text, given, results, stream, device)) throw std::runtime_error("a launch was not kept");
  } else {
    py::gil_scoped_acquire const locked;
    run_by_python(text, given, results, py::none(), py::none());
  }
}

/// What XLA calls: tells it what was raised.
template <bool cuda>
Error* handle(Frame* frame) {
  if (frame->extension && frame->extension->type == kMetadata) {
    Metadata& metadata = *reinterpret_cast<MetadataExtension*>(frame->extension)->metadata;
    metadata.version.major = kMajor;
    metadata.version.minor = kMinor;
    metadata.traits = 0;
    return nullptr;
  }
  try {
    execute<cuda>(*frame);
    return nullptr;
  } catch (std::exception const& error) {
    ErrorAsked asked{sizeof(asked), nullptr, error.what(), kInvalidArgument};
    return frame->api->error_create(&asked);
  }
}

template <bool cuda>
py::capsule handler() {
  return py::capsule(reinterpret_cast<void*>(&handle<cuda>));
}

}  // namespace

void bind_xla(py::module_& m) {
  m.def(
      "xla_handlers",
      [](py::object run) {
        Py_XDECREF(std::exchange(python_run, run.release().ptr()));
        return std::pair(handler<false>(), handler<true>());
      },
      py::arg("run"));
  m.def(
      "xla_keep",
      [](py::bytes const& text, int device, int row, AttentionParams const& params, double scale, bool lse, bool room,
         std::vector<std::pair<size_t, std::string>> const& places) {
        Launch launch{row, params, scale, lse, room, {}};
        for (auto const& [argument, name] : places) launch.places.emplace_back(argument, set_address(name));
        launches().keep(text, device, std::move(launch));
      },
      py::arg("text"), py::arg("device"), py::arg("row"), py::arg("params"), py::arg("scale"), py::arg("lse"),
      py::arg("room"), py::arg("places"));
  m.def(
      "xla_kept",
      [](py::bytes const& text, int device, Addresses const& given, Addresses const& results) {
        auto const kept = launches().find(std::string(text), device);
        return kept ? std::optional(std::pair(kept->row, kept->of(given, results))) : std::nullopt;
      },
      py::arg("text"), py::arg("device"), py::arg("arguments"), py::arg("results"));
}

}  // namespace cutlass_fmha
