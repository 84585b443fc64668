// Ops beside attention by their own launches, bf16: us and the share of a copy's rate, at 64 KiB, 1 MiB, 64 MiB and
// 256 MiB of the first tensor; `few`: gradients of norms from a single row on, rows of 2048 and 4096. Results against plain
// kernels in fp64. launches.sh compiles it against several sources.
#include <cuda_runtime.h>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>
#include "beside/gated.cuh"
#include "beside/rms_norm.cuh"
#include "beside/rms_norm_backward.cuh"
#include "beside/rope.cuh"
#if __has_include("beside/rope_backward.cuh")
#include "beside/rope_backward.cuh"
#endif
#define Row TableRow  // there are two
#include "beside/launch.cpp"
#include "beside/rope_launch.cpp"
#ifndef ROPE  // blocks of an SM that registers leave room for
#define ROPE 6
#endif
#ifndef ROPE_BACKWARD
#define ROPE_BACKWARD 4
#endif
#ifndef PARTS
#define PARTS 4
#endif
#ifndef AHEAD
#define AHEAD 12
#endif
#ifndef NORM
#define NORM 2
#endif
#ifndef NORM_BLOCKS  // of an SM
#define NORM_BLOCKS 1
#endif
#ifndef PDL
#define PDL true
#endif
#define CK(x) do { cudaError_t status_ = (x); if (status_ != cudaSuccess) { printf("%s:%d %s\n", __FILE__, __LINE__, cudaGetErrorString(status_)); exit(1); } } while (0)
using namespace cutlass_fmha;
using bf = __nv_bfloat16;
#define K(fn, P, ...) extern "C" __global__ void __launch_bounds__(__VA_ARGS__) k_##fn(__grid_constant__ P const p) { fn<bf>(p); }
K(rope, RopeParams, 128, ROPE) K(rope_backward, RopeBackwardParams, 128, ROPE_BACKWARD) K(rope_weights, RopeBackwardParams, 128)
K(rms_norm_backward, RmsNormBackwardParams, 512, 1) K(rms_norm_weights, RmsNormBackwardParams, 128)
K(gated_backward, GatedBackwardParams, 256) K(gated, GatedParams, 256) K(rms_norm, RmsNormParams, 512, NORM)
Row row(Family family, void const* kernel, bool overlapped, int block, int smem = 0) {
  return Row{"", HelperConfig{.kind = family, .arch = 90, .dtype = DType::bfloat16, .dependent_launch = overlapped, .block = block}, smem, kernel};
}
Row const kRope = row(Family::rope, (void const*)k_rope, PDL, 128), kRopeB = row(Family::rope_backward, (void const*)k_rope_backward, PDL, 128);
Row const kRopeW = row(Family::rope_weights, (void const*)k_rope_weights, PDL, 128), kNormW = row(Family::rms_norm_weights, (void const*)k_rms_norm_weights, true, 128);
Row const kNormB = row(Family::rms_norm_backward, (void const*)k_rms_norm_backward, true, 512 / NORM_BLOCKS, AHEAD * 512 / NORM_BLOCKS * 16);
Row const kNorm = row(Family::rms_norm, (void const*)k_rms_norm, PDL, 512), kGated = row(Family::gated, (void const*)k_gated, PDL, 256);
Row const kGatedB = row(Family::gated_backward, (void const*)k_gated_backward, true, 256);
namespace cutlass_fmha {
Row const& helper(Family family, DType, int) { return family == Family::rope_weights ? kRopeW : kNormW; }
void launch_kernel(Row const& row, dim3 grid, void const* params, int, cudaStream_t stream, int threads, int smem_bytes) {
  cudaLaunchConfig_t c{}; cudaLaunchAttribute a{};
  c.gridDim = grid; c.blockDim = dim3(unsigned(threads ? threads : row.threads())); c.stream = stream;
  c.dynamicSmemBytes = smem_bytes < 0 ? row.smem_bytes : smem_bytes;
  a.id = cudaLaunchAttributeProgrammaticStreamSerialization; a.val.programmaticStreamSerializationAllowed = 1;
  c.attrs = &a; c.numAttrs = row.dependent_launch();
  void* args[] = {const_cast<void*>(params)};
  CK(cudaLaunchKernelExC(&c, row.kernel, args));
}
}  // namespace cutlass_fmha

__device__ float worst;
__device__ void differ(double found, double wanted, double scale) {
  float e = float(fabs(found - wanted) / scale);
  if (!(e < 1e30f)) e = 1e30f;
  atomicMax(reinterpret_cast<int*>(&worst), __float_as_int(e));
}
__device__ double add(double x) { for (int k = 16; k; k /= 2) x += __shfl_xor_sync(~0u, x, k); return x; }
constexpr int D = 128, H = 32, HK = 8;
// of a warp: row blockIdx.x of q's or k's
__global__ void ref_rope(bf const* x, bf const* out, bf const* w, float const* cos, float const* sin, int heads, bool norm) {
  int64_t base = int64_t(blockIdx.x) * D, token = blockIdx.x / heads; double sum = 0;
  auto at = [&](int i) { return double(float(x[base + i])); };
  for (int i = threadIdx.x; i < D; i += 32) sum += at(i) * at(i);
  double r = norm ? 1 / sqrt(add(sum) / D + 1e-6) : 1;
  for (int i = threadIdx.x; i < D / 2; i += 32) {
    double a = at(i) * r * (norm ? double(float(w[i])) : 1), b = at(i + 64) * r * (norm ? double(float(w[i + 64])) : 1), c = cos[token * 64 + i], s = sin[token * 64 + i];
    differ(float(out[base + i]), a * c - b * s, fabs(a) + fabs(b) + 1e-3); differ(float(out[base + i + 64]), b * c + a * s, fabs(a) + fabs(b) + 1e-3);
  }
}
// dx, and what each row gives for the weight into dw, by atomics
__global__ void ref_rope_b(bf const* x, bf const* g, bf const* dx, bf const* w, float const* cos, float const* sin, int heads, double* dw) {
  int64_t base = int64_t(blockIdx.x) * D, token = blockIdx.x / heads; double sum = 0, product = 0;
  auto at = [&](int i) { return double(float(x[base + i])); };
  auto turned = [&](int i) { int n = i % 64; double c = cos[token * 64 + n], s = sin[token * 64 + n], a = double(float(g[base + n])), b = double(float(g[base + n + 64])); return i < 64 ? a * c + b * s : b * c - a * s; };
  for (int i = threadIdx.x; i < D; i += 32) sum += at(i) * at(i), product += at(i) * turned(i) * double(float(w[i]));
  double r = 1 / sqrt(add(sum) / D + 1e-6), mean = add(product) * r / D;
  for (int i = threadIdx.x; i < D; i += 32) {
    double t = turned(i) * double(float(w[i])), n = at(i) * r;
    differ(float(dx[base + i]), r * (t - n * mean), fabs(r * t) + fabs(r * n * mean) + 1e-3);
    atomicAdd(dw + i, turned(i) * n);
  }
}
__global__ void compare(bf const* found, double const* wanted, int n, double scale) { for (int i = threadIdx.x; i < n; i += 256) differ(float(found[i]), wanted[i], fabs(wanted[i]) + scale); }
__global__ void ref_norm_b(bf const* x, bf const* dd, bf const* ds, bf const* w, float const* rstd, bf const* dx, int dim, double* dw) {
  int64_t base = int64_t(blockIdx.x) * dim; double sum = 0, r = rstd[blockIdx.x];
  for (int i = threadIdx.x; i < dim; i += 32) sum += double(float(x[base + i])) * r * double(float(dd[base + i])) * double(float(w[i]));
  sum = add(sum);
  for (int i = threadIdx.x; i < dim; i += 32) {
    double y = double(float(x[base + i])) * r, g = double(float(dd[base + i])) * double(float(w[i])), t = r * (g - y * sum / dim) + (ds ? double(float(ds[base + i])) : 0);
    differ(float(dx[base + i]), t, fabs(r * g) + fabs(r * y * sum / dim) + fabs(t) + 1e-3);
    atomicAdd(dw + i, y * double(float(dd[base + i])));
  }
}
__global__ void ref_norm(bf const* x, bf const* r, bf const* w, bf const* out, int dim) {
  int64_t base = int64_t(blockIdx.x) * dim; double sum = 0;
  auto at = [&](int i) { return r ? double(float(__float2bfloat16_rn(float(x[base + i]) + float(r[base + i])))) : double(float(x[base + i])); };
  for (int i = threadIdx.x; i < dim; i += 32) sum += at(i) * at(i);
  double f = 1 / sqrt(add(sum) / dim + 1e-6);
  for (int i = threadIdx.x; i < dim; i += 32) { double y = at(i) * f * double(float(w[i])); differ(float(out[base + i]), y, fabs(y) + 1e-3); }
}
__global__ void ref_gated(bf const* g, bf const* u, bf const* out, int64_t n) {
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < n; i += gridDim.x * 256ll) {
    double x = double(float(g[i])), y = x / (1 + exp(-x)) * double(float(u[i])); differ(float(out[i]), y, fabs(y) + 1e-6);
  }
}
__global__ void ref_gated_b(bf const* g, bf const* u, bf const* d, bf const* dg, bf const* du, int64_t n, bool tanh_) {
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < n; i += gridDim.x * 256ll) {
    double x = double(float(g[i])), y = double(float(u[i])), z = double(float(d[i])), inner = x, step = 1;
    if (tanh_) inner = x * 1.5957691216057308 * (1 + 0.044715 * x * x), step = 1.5957691216057308 * (1 + 3 * 0.044715 * x * x);
    double s = 1 / (1 + exp(-inner)), slope = s * (1 + x * (1 - s) * step);
    differ(float(dg[i]), z * y * slope, fabs(z * y) + 1e-6); differ(float(du[i]), z * x * s, fabs(z * x) + 1e-6);
  }
}
__global__ void fill(bf* x, int64_t n, unsigned seed) {
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < n; i += gridDim.x * 256ll) {
    unsigned h = unsigned(i) * 2654435761u ^ seed; h ^= h >> 15; h *= 2246822519u; h ^= h >> 13; h *= 3266489917u; h ^= h >> 16;
    x[i] = __float2bfloat16_rn((float(h >> 8) / 16777216.f - 0.5f) * 6.f);
  }
}
__global__ void fill_f(float* x, int64_t n, float step) { for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < n; i += gridDim.x * 256ll) x[i] = step ? sinf(float(i) * step) : 0.5f; }

constexpr int64_t kArena = 256ll << 20;
bf *A[6], *W, *DW; float *partial, *tables[2], *rstd; double* sums; cudaStream_t stream;
using Launch = std::function<void(int64_t at)>;  // elements of the first tensor from which it begins
float timed(Launch const& f, int64_t bytes, int64_t moved) {
  int64_t n = std::max<int64_t>(16, (128ll << 20) / moved);
  cudaGraph_t g; cudaGraphExec_t e; cudaEvent_t t0, t1;
  CK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  for (int64_t i = 0; i < n; ++i) f(i * bytes % kArena / 2);
  CK(cudaStreamEndCapture(stream, &g)); CK(cudaGraphInstantiate(&e, g, 0));
  cudaEventCreate(&t0); cudaEventCreate(&t1);
  std::vector<float> all;
  for (int r = 0; r < 7; ++r) {
    cudaEventRecord(t0, stream); CK(cudaGraphLaunch(e, stream)); cudaEventRecord(t1, stream); CK(cudaStreamSynchronize(stream));
    float ms; cudaEventElapsedTime(&ms, t0, t1); if (r > 1) all.push_back(ms * 1e3f / n);
  }
  cudaGraphExecDestroy(e); cudaGraphDestroy(g); cudaEventDestroy(t0); cudaEventDestroy(t1);
  std::sort(all.begin(), all.end());
  return all[all.size() / 2];
}
char const* variant;
std::vector<int64_t> sizes{8 << 10, 64 << 10, 256 << 10, 1 << 20, 64 << 20, 256 << 20};
// moved: in quarters of the first tensor
void line(char const* op, int quarters, std::function<Launch(int64_t)> run, std::function<void(int64_t)> check) {
  float zero = 0, found; CK(cudaMemcpyToSymbol(worst, &zero, 4));
  for (int64_t b : {1 << 13, 1 << 20, 1 << 16, 12 << 20}) {
    for (int i : {4, 5}) CK(cudaMemsetAsync(A[i], 0xff, b, stream));
    CK(cudaMemsetAsync(DW, 0xff, 65536, stream)); CK(cudaMemsetAsync(sums, 0, 65536, stream)); CK(cudaMemsetAsync(partial, 0xff, 8 << 20, stream));
    for (int i = 0; i < 2; ++i) run(b)(0);
    CK(cudaStreamSynchronize(stream)); check(b); CK(cudaDeviceSynchronize());
  }
  CK(cudaMemcpyFromSymbol(&found, worst, 4));
  printf("%-18s %-9s", variant, op);
  for (int64_t b : sizes) {
    int64_t const moved = b * quarters / 4;
    float copy = timed([&](int64_t) { static int64_t at = 0; if ((at += moved / 2) + moved / 2 > kArena) at = 0;
      for (int64_t rest = moved / 2, done = 0; rest > done; done += kArena) CK(cudaMemcpyAsync(A[0] + at / 2, A[1] + at / 2, std::min(rest - done, kArena), cudaMemcpyDeviceToDevice, stream)); }, b, moved);
    float us = timed(run(b), b, moved);
    printf(" | %9lld %7.2f us %4.0f%%", (long long)b, us, 100 * copy / us);
  }
  printf(" | err %.1e%s\n", found, found < 0.02f ? "" : " WRONG"); fflush(stdout);
}
template <class P> P rope_params(int64_t b, int64_t at, bool norm) {
  P p{}; int tokens = int(b / (H * D * 2)); int64_t at_k = kArena / 2 + at / 4;  // keys behind queries
  p.batch = 1; p.seqlen = tokens; p.head_dim = D; p.norm = norm; p.eps = 1e-6f;
  auto set = [&](RopeRows& r, int heads, int64_t from, int n) {
    r.x = A[0] + from; r.out = A[4] + from; r.gradient = A[2] + from; r.num_heads = heads; r.head_dim = D;
    r.x_stride = r.out_stride = r.gradient_stride = {0, heads * D, D};
    if (norm) r.weight = W + n * D;
    r.partial = partial + n * (1 << 18); r.weight_gradient = DW + n * D;
  };
  set(p.q, H, at, 0); set(p.k, HK, at_k, 1);
  p.rotary = {tables[0] + at / 64, tables[1] + at / 64, 64, 64, tokens, D, false, true};
  return p;
}
void rope_lines() {
  for (bool norm : {true, false}) line(norm ? "norm_rope" : "rotary", 10, [=](int64_t b) -> Launch { return [=](int64_t at) { launch(kRope, rope_params<RopeParams>(b, at, norm), 0, stream); }; },
    [=](int64_t b) { int n = int(b / (H * D * 2));
      ref_rope<<<n * H, 32>>>(A[0], A[4], W, tables[0], tables[1], H, norm); ref_rope<<<n * HK, 32>>>(A[0] + kArena / 2, A[4] + kArena / 2, W + D, tables[0], tables[1], HK, norm); });
  line("norm_r_b", 15, [](int64_t b) -> Launch { return [=](int64_t at) { auto p = rope_params<RopeBackwardParams>(b, at, true); p.inverse = true; p.parts = PARTS * 132; launch(kRopeB, p, 0, stream); }; },
    [](int64_t b) { int n = int(b / (H * D * 2));
      ref_rope_b<<<n * H, 32>>>(A[0], A[2], A[4], W, tables[0], tables[1], H, sums); ref_rope_b<<<n * HK, 32>>>(A[0] + kArena / 2, A[2] + kArena / 2, A[4] + kArena / 2, W + D, tables[0], tables[1], HK, sums + D);
      compare<<<1, 256>>>(DW, sums, 2 * D, 0.5); });
}
template <class P> void describe(P& p, int64_t rows, int dim) { p.sizes[0] = p.sizes[1] = 1; p.sizes[2] = rows; p.dim = dim; }
void norm_lines() {
  for (bool sum : {false, true}) line(sum ? "res" : "rms", sum ? 16 : 8, [=](int64_t b) -> Launch { return [=](int64_t at) {
      RmsNormParams p{}; describe(p, b / 8192, 4096);
      p.x = A[0] + at; p.out = A[4] + at; if (sum) p.residual = A[1] + at, p.sum = A[5] + at;
      p.weight = W; p.out_type = p.weight_type = DType::bfloat16; p.eps = 1e-6f;
      p.x_stride = p.out_stride = p.residual_stride = p.sum_stride = {0, 0, 4096};
      launch(kNorm, p, 0, stream); }; },
    [=](int64_t b) { ref_norm<<<int(b / 8192), 32>>>(A[0], sum ? A[1] : nullptr, W, A[4], 4096); });
}
void norm_backward_lines(int dim) {
  for (bool sum : {false, true}) line(((sum ? "res_b" : "rms_b") + (dim == 4096 ? "" : std::to_string(dim))).c_str(), sum ? 16 : 12, [=](int64_t b) -> Launch { return [=](int64_t at) {
      RmsNormBackwardParams p{}; describe(p, b / (2 * dim), dim);
      p.x = A[0] + at; p.dout = A[1] + at; p.dx = A[4] + at; if (sum) p.dsum = A[2] + at;
      p.weight = W; p.rstd = rstd; p.dweight = DW; p.partial = partial; p.parts = NORM_BLOCKS * 132; p.out_type = p.weight_type = DType::bfloat16;
      p.x_stride = p.dout_stride = p.dx_stride = p.dsum_stride = {0, 0, dim};
      launch(kNormB, p, 0, stream); }; },
    [=](int64_t b) { ref_norm_b<<<int(b / (2 * dim)), 32>>>(A[0], A[1], sum ? A[2] : nullptr, W, rstd, A[4], dim, sums); compare<<<1, 256>>>(DW, sums, dim, 0.5); });
}
void gated_lines() {
  line("swiglu", 12, [](int64_t b) -> Launch { return [=](int64_t at) {
      GatedParams p{}; describe(p, std::max<int64_t>(1, b / 8192), 4096);
      p.gate = A[0] + at; p.up = A[1] + at; p.out = A[4] + at; p.activation = Activation::silu;
      p.gate_stride = p.up_stride = p.out_stride = {0, 0, 4096};
      launch(kGated, p, 0, stream); }; },
    [](int64_t b) { ref_gated<<<256, 256>>>(A[0], A[1], A[4], b / 2); });
  for (bool tanh_ : {false, true}) line(tanh_ ? "geglu_b" : "swiglu_b", 20, [=](int64_t b) -> Launch { return [=](int64_t at) {
      GatedBackwardParams p{}; describe(p, std::max<int64_t>(1, b / 8192), 4096);
      p.gate = A[0] + at; p.up = A[1] + at; p.dout = A[2] + at; p.dgate = A[4] + at; p.dup = A[5] + at; p.activation = tanh_ ? Activation::gelu_tanh : Activation::silu;
      p.gate_stride = p.up_stride = p.out_stride = p.dout_stride = p.dgate_stride = p.dup_stride = {0, 0, 4096};
      launch(kGatedB, p, 0, stream); }; },
    [=](int64_t b) { ref_gated_b<<<256, 256>>>(A[0], A[1], A[2], A[4], A[5], b / 2, tanh_); });
}
int main(int count, char** given) {
  variant = count > 1 ? given[1] : "";
  std::string const what = count > 2 ? given[2] : "rope norm gated";
  CK(cudaStreamCreate(&stream));
  CK(cudaFuncSetAttribute(k_rms_norm_backward, cudaFuncAttributeMaxDynamicSharedMemorySize, kNormB.smem_bytes));
  for (int i : {0, 1, 2, 4, 5}) { CK(cudaMalloc(&A[i], 2 * kArena)); fill<<<1024, 256>>>(A[i], kArena, 77u * i); }
  CK(cudaMalloc(&W, 65536)); CK(cudaMalloc(&DW, 65536)); CK(cudaMalloc(&sums, 65536)); fill<<<64, 256>>>(W, 32768, 5); CK(cudaMalloc(&partial, 8 << 20)); CK(cudaMalloc(&rstd, 4 << 20)); fill_f<<<64, 256>>>(rstd, 1 << 20, 0);
  for (int i : {0, 1}) { CK(cudaMalloc(&tables[i], kArena / 64 * 4)); fill_f<<<64, 256>>>(tables[i], kArena / 64, 0.7f + i); }
  CK(cudaDeviceSynchronize());
  if (what.find("rope") != what.npos) rope_lines();
  if (what.find("norm") != what.npos) norm_lines(), norm_backward_lines(4096);
  if (what.find("gated") != what.npos) gated_lines();
  sizes = {4 << 10, 8 << 10, 64 << 10, 256 << 10, 1 << 20, 64 << 20};
  if (what.find("few") != what.npos) norm_backward_lines(2048), sizes.erase(sizes.begin()), norm_backward_lines(4096);
}
