// Kernels on rows, bf16: us and the share of a copy's rate, by variant. -DBEFORE: those of the commit that run.sh names.
#include <cuda_runtime.h>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>
#include "beside/gated.cuh"
#include "beside/rms_norm.cuh"
#include "beside/rms_norm_backward.cuh"
using namespace cutlass_fmha;
using bf = __nv_bfloat16;
#define CK(x) do { cudaError_t status_ = (x); if (status_ != cudaSuccess) { printf("%s:%d %s\n", __FILE__, __LINE__, cudaGetErrorString(status_)); exit(1); } } while (0)
#define K(name, fn, P, B, ...) extern "C" __global__ void __launch_bounds__ B name(__grid_constant__ P const p) { fn<__VA_ARGS__>(p); }
using GP = GatedParams; using GB = GatedBackwardParams; using RP = RmsNormParams; using RB = RmsNormBackwardParams;
#ifdef BEFORE
K(r4, rms_norm, RP, (256, 4), bf, 4) K(r2, rms_norm, RP, (512, 3), bf, 2)
K(rb1, rms_norm_backward, RB, (1024, 1), bf)
#else
K(g1, gated, GP, (256), bf, 1) K(gb1, gated_backward, GB, (256), bf, 1)
K(r1, rms_norm, RP, (512, 2), bf, 1) K(r2, rms_norm, RP, (512, 2), bf, 2) K(r4, rms_norm, RP, (256, 3), bf, 4)
K(rb1, rms_norm_backward, RB, (512, 2), bf, 1) K(rb2, rms_norm_backward, RB, (512, 1), bf, 2)
#endif
K(rw, rms_norm_weights, RB, (128), bf)

// ---- reference, naive
__device__ double act(double x, int kind) {
  if (kind == 0) return x / (1 + exp(-x));
  return x / 2 * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
}
__device__ float worst;
__device__ void differ(double found, double wanted, double scale) {
  float e = float(fabs(found - wanted) / scale);
  if (!(e < 1e30f)) e = 1e30f;
  atomicMax(reinterpret_cast<int*>(&worst), __float_as_int(e));
}
__global__ void ref_gated(bf const* g, bf const* u, int64_t gs, bf const* o, int64_t rows, int dim, int kind) {
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < rows * dim; i += gridDim.x * 256ll) {
    int64_t at = i / dim * gs + i % dim;
    double a = double(float(g[at])), b = double(float(u[at]));
    differ(float(o[i]), act(a, kind) * b, fabs(a * b) + 1e-6);
  }
}
__global__ void ref_gated_b(bf const* g, bf const* u, bf const* d, bf const* dg, bf const* du, int64_t n) {
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < n; i += gridDim.x * 256ll) {
    double x = double(float(g[i])), y = double(float(u[i])), z = double(float(d[i])), s = 1 / (1 + exp(-x));
    differ(float(dg[i]), z * y * s * (1 + x * (1 - s)), fabs(z * y) * (1 + fabs(x)) + 1e-6);
    differ(float(du[i]), z * x * s, fabs(z * x) + 1e-6);
  }
}
__global__ void ref_rms(bf const* x, bf const* r, bf const* w, bf const* o, int dim) {  // a warp a row
  bf const* const row = x + int64_t(blockIdx.x) * dim;
  double sum = 0;
  auto at = [&](int i) { float v = float(row[i]); if (r) v = float(__float2bfloat16_rn(v + float(r[int64_t(blockIdx.x) * dim + i]))); return double(v); };
  for (int i = threadIdx.x; i < dim; i += 32) sum += at(i) * at(i);
  for (int k = 16; k; k /= 2) sum += __shfl_xor_sync(~0u, sum, k);
  for (int i = threadIdx.x; i < dim; i += 32) { double y = at(i) / sqrt(sum / dim + 1e-6) * double(float(w[i])); differ(float(o[int64_t(blockIdx.x) * dim + i]), y, fabs(y) + 1e-3); }
}
__global__ void ref_rms_b(bf const* x, bf const* dd, bf const* ds, bf const* w, float const* rstd, bf const* dx, int dim) {
  int64_t const base = int64_t(blockIdx.x) * dim;
  double sum = 0, r = rstd[blockIdx.x];
  for (int i = threadIdx.x; i < dim; i += 32) sum += double(float(x[base + i])) * r * double(float(dd[base + i])) * double(float(w[i]));
  for (int k = 16; k; k /= 2) sum += __shfl_xor_sync(~0u, sum, k);
  for (int i = threadIdx.x; i < dim; i += 32) {
    double y = double(float(x[base + i])) * r, g = double(float(dd[base + i])) * double(float(w[i])), t = r * (g - y * sum / dim) + (ds ? double(float(ds[base + i])) : 0);
    differ(float(dx[base + i]), t, fabs(r * g) + fabs(r * y * sum / dim) + fabs(t) + 1e-3);
  }
}
__global__ void ref_rms_w(bf const* x, bf const* dd, float const* rstd, bf const* dw, int rows, int dim) {
  int i = blockIdx.x * 32 + threadIdx.x;
  double sum = 0, all = 0;
  for (int64_t n = 0; n < rows; ++n) { double t = double(float(x[n * dim + i])) * rstd[n] * double(float(dd[n * dim + i])); sum += t; all += fabs(t); }
  differ(float(dw[i]), sum, fabs(sum) + all / 64);
}
__global__ void fill(bf* x, int64_t n, unsigned seed) {
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < n; i += gridDim.x * 256ll) {
    unsigned h = unsigned(i) * 2654435761u ^ seed; h ^= h >> 15; h *= 2246822519u; h ^= h >> 13; h *= 3266489917u; h ^= h >> 16;
    x[i] = __float2bfloat16_rn((float(h >> 8) / 16777216.f - 0.5f) * 6.f);
  }
}
__global__ void fill_f(float* x, int64_t n) { for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < n; i += gridDim.x * 256ll) x[i] = 0.5f; }

constexpr int64_t kArena = 256ll << 20;
bf *A[6], *W, *DW; float *partial, *rstd; cudaStream_t stream;
using Launch = std::function<void(int64_t at)>;  // elements from which tensors begin
bool pdl = false;
template <class P> void go(void (*k)(P), int64_t grid, int block, P const& p, int smem = 0) {
  cudaLaunchConfig_t c{}; cudaLaunchAttribute a{};
  c.gridDim = dim3(unsigned(grid)); c.blockDim = dim3(block); c.stream = stream; c.dynamicSmemBytes = smem;
  a.id = cudaLaunchAttributeProgrammaticStreamSerialization; a.val.programmaticStreamSerializationAllowed = 1;
  c.attrs = &a; c.numAttrs = pdl;
  if (smem > 40 << 10) CK(cudaFuncSetAttribute(k, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
  CK(cudaLaunchKernelEx(&c, k, p));
}
float timed(Launch const& f, int64_t bytes, int tensors) {
  int64_t n = std::max<int64_t>(20, (128ll << 20) / (bytes * tensors));
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
constexpr int64_t kSizes[] = {64 << 10, 1 << 20, 64 << 20, 256 << 20};
// run(bytes) gives the launch for tensors of so many bytes; tensors: that move; check: after a launch.
enum Modes { plain, overlapped, both };
void line(char const* op, std::string name, int tensors, std::function<Launch(int64_t)> run, std::function<void(int64_t)> check, Modes modes) {
  for (int mode = 0; mode < 2; ++mode) {
    if (modes != both && modes != mode) continue;
    pdl = mode;
    float zero = 0, found; CK(cudaMemcpyToSymbol(worst, &zero, 4));
    for (int64_t b : {1 << 20, 1 << 16, 12 << 20}) {
      for (int i : {2, 4, 5}) CK(cudaMemsetAsync(A[i], 0xff, b, stream));
      for (int i = 0; i < 3; ++i) run(b)(0);
      CK(cudaStreamSynchronize(stream)); check(b); CK(cudaDeviceSynchronize());
    }
    CK(cudaMemcpyFromSymbol(&found, worst, 4));
    printf("%-9s %-14s%s", op, name.c_str(), mode ? "+pdl" : "    ");
    static float copies[8][4];
    for (int s = 0; s < 4; ++s) {
      int64_t b = kSizes[s];
      float& copy = copies[tensors][s];
      if (!copy) copy = timed([&](int64_t at) {
        for (int64_t rest = b * tensors / 2, done = 0; rest > done; done += kArena) {  // one of more than a GiB is slow
          CK(cudaMemcpyAsync(A[0] + at / 2 * tensors + done / 2, A[1] + at / 2 * tensors + done / 2, std::min(rest - done, kArena), cudaMemcpyDeviceToDevice, stream));
        }
      }, b, tensors);
      float us = timed(run(b), b, tensors);
      printf(" %7.2f %4.0f%%", us, 100 * copy / us);
    }
    printf(" err %.1e%s\n", found, found < 0.02f ? "" : " WRONG");
  }
  fflush(stdout);
}
void describe(RowsParams& p, int64_t rows, int dim) {
  p.sizes[0] = p.sizes[1] = 1; p.sizes[2] = rows; p.dim = dim; p.rows = int(rows);
  p.by_middle = Divisor(1); p.by_inner = Divisor(int(rows)); p.flat = true;
}
int log2_up(int64_t n) { int k = 0; while ((1ll << k) < n) ++k; return k; }

template <class P> void gated_setup(P& p, int64_t elements, bool packed) {
  int dim = packed ? 4096 : int(elements); int64_t rows = packed ? elements / 4096 : 1;
  describe(p, rows, dim); p.chunks = dim / 8; p.aligned = true; p.by_chunks = Divisor(p.chunks);
  p.gate_stride = p.up_stride = {0, 0, packed ? 8192 : 0}; p.out_stride = {0, 0, packed ? 4096 : 0}; p.activation = Activation::silu;
}
#ifndef BEFORE
void gated_line(char const* op, std::string name, void (*k)(GP), int block, int v, int kind, bool packed, Modes modes) {
  line(op, name, 3, [=](int64_t b) -> Launch {
    return [=](int64_t at) {
      GP p{}; int64_t n = b / 2; gated_setup(p, n, packed);
      if (packed) { p.gate = A[0] + 2 * at; p.up = A[0] + 2 * at + 4096; p.out = A[2] + at; }
      else { p.gate = A[0] + at; p.up = A[1] + at; p.out = A[2] + at; }
      p.activation = kind ? Activation::gelu_tanh : Activation::silu;
      go(k, (int64_t(p.rows) * p.chunks + block * v - 1) / (block * v), block, p);
    }; }, [=](int64_t b) { int64_t n = b / 2;
      if (packed) ref_gated<<<256, 256>>>(A[0], A[0] + 4096, 8192, A[2], n / 4096, 4096, kind);
      else ref_gated<<<256, 256>>>(A[0], A[1], n, A[2], 1, int(n), kind); }, modes);
}
void gated_b_line(char const* op, std::string name, void (*k)(GB), int block, int v, Modes modes) {
  line(op, name, 5, [=](int64_t b) -> Launch {
    return [=](int64_t at) {
      GB p{}; gated_setup(p, b / 2, false);
      p.gate = A[0] + at; p.up = A[1] + at; p.dout = A[2] + at; p.dgate = A[4] + at; p.dup = A[5] + at;
      go(k, (int64_t(p.rows) * p.chunks + block * v - 1) / (block * v), block, p);
    }; }, [=](int64_t b) { ref_gated_b<<<256, 256>>>(A[0], A[1], A[2], A[4], A[5], b / 2); }, modes);
}
#endif
// v vectors a lane, `ahead` asked for ahead by each thread, `blocks` of an SM; ahead 0: a row of a group of lanes each.
void rms_line(char const* op, void (*k)(RP), int dim, int v, int ahead, int blocks, bool res, Modes modes) {
  int const chunks = dim / 8, lanes_log2 = log2_up(chunks / v), block = std::max(128, 1 << lanes_log2);
  std::string const name = "v" + std::to_string(v) + "x" + std::to_string(block) + (ahead ? " a" + std::to_string(ahead) + "b" + std::to_string(blocks) : "");
  line(op, name, res ? 4 : 2, [=](int64_t b) -> Launch {
    return [=](int64_t at) {
      RP p{}; int64_t rows = b / 2 / dim; describe(p, rows, dim);
      p.x = A[0] + at; p.out = A[2] + at; p.weight = W; if (res) { p.residual = A[1] + at; p.sum = A[4] + at; }
      p.x_stride = p.out_stride = p.residual_stride = p.sum_stride = {0, 0, dim}; p.eps = 1e-6f; p.out_type = p.weight_type = DType::bfloat16;
      p.per_dim = 1.f / dim; p.walk = Walk::kept; p.lanes_log2 = lanes_log2;
      int64_t grid = ((rows << lanes_log2) + block - 1) / block; int smem = 0;
#ifdef BEFORE
      p.vectors = v;
#else
      if (ahead) { int turn = v * (res ? 2 : 1); p.stages = std::max(1, ahead / turn); smem = p.stages * turn * block * 16; grid = std::min<int64_t>(grid, blocks * 132); }
#endif
      go(k, grid, block, p, smem);
    }; }, [=](int64_t b) { ref_rms<<<int(b / 2 / dim), 32>>>(A[0], res ? A[1] : nullptr, W, A[2], dim); }, modes);
}
// direct: dweight by blocks beside those of dx; two: by a second launch; none
enum Weights { none, two, direct, as_launched };
void rms_b_line(char const* op, void (*k)(RB), int dim, int v, int ahead, int blocks_of_sm, bool sum, Weights weights, Modes modes) {
  int const chunks = dim / 8, lanes_log2 = log2_up(chunks / v), block = 512;
  char const* const kNames[] = {" no dw", " two", " direct", ""};
  std::string const name = "v" + std::to_string(v) + " a" + std::to_string(ahead) + "b" + std::to_string(blocks_of_sm) + kNames[weights];
  line(op, name, sum ? 4 : 3, [=](int64_t b) -> Launch {
    return [=](int64_t at) {
      RB p{}; int64_t rows = b / 2 / dim; describe(p, rows, dim);
      p.x = A[0] + at; p.dout = A[1] + at; p.dx = A[2] + at; if (sum) p.dsum = A[3] + at;
      p.weight = W; p.rstd = rstd; p.dweight = weights ? DW : nullptr; p.partial = partial;
      p.x_stride = p.dout_stride = p.dx_stride = p.dsum_stride = {0, 0, dim}; p.out_type = p.weight_type = DType::bfloat16;
      p.per_dim = 1.f / dim; p.walk = Walk::kept; p.lanes_log2 = lanes_log2;
      int64_t all = ((rows << lanes_log2) + block - 1) / block, grid = std::min<int64_t>(all, blocks_of_sm * 132); int smem = 0;
      bool two_launches = weights == two || (weights == as_launched && all + (dim + 127) / 128 > blocks_of_sm * 132);
      p.parts = int(grid);
#ifdef BEFORE
      two_launches = weights != none;
#else
      int turn = v * (sum ? 3 : 2); p.row_blocks = int(grid); p.stages = int(std::max<int64_t>(1, std::min<int64_t>(ahead / turn, (all + grid - 1) / grid))); smem = p.stages * turn * block * 16;
      if (!two_launches) p.parts = 0;
      if (weights && !two_launches) grid += (dim + 127) / 128;
#endif
      go(k, grid, block, p, smem);
      if (two_launches) go(rw, dim / 32, 128, p);
    }; }, [=](int64_t b) { int rows = int(b / 2 / dim); ref_rms_b<<<rows, 32>>>(A[0], A[1], sum ? A[3] : nullptr, W, rstd, A[2], dim);
      if (weights) ref_rms_w<<<dim / 32, 32>>>(A[0], A[1], rstd, DW, rows, dim); }, modes);
}
int main() {
  CK(cudaStreamCreate(&stream));
  for (int i = 0; i < 6; ++i) { int64_t n = i < 2 ? 3 * kArena : kArena; CK(cudaMalloc(&A[i], n)); fill<<<1024, 256>>>(A[i], n / 2, 77u * i); }
  CK(cudaMalloc(&W, 65536)); CK(cudaMalloc(&DW, 65536)); fill<<<64, 256>>>(W, 32768, 5); CK(cudaMalloc(&partial, 64 << 20)); CK(cudaMalloc(&rstd, 4 << 20)); fill_f<<<64, 256>>>(rstd, 1 << 20);
  CK(cudaDeviceSynchronize());
#ifdef BEFORE
  printf("## before, with plain loads; columns: 64 KiB, 1 MiB, 64 MiB, 256 MiB of a tensor: us, share of the copy\n");
  rms_line("rms4096", r4, 4096, 4, 0, 0, false, overlapped); rms_line("rms4096", r2, 4096, 2, 0, 0, false, overlapped);
  rms_line("res4096", r4, 4096, 4, 0, 0, true, overlapped); rms_b_line("rms_b4096", rb1, 4096, 1, 0, 2, false, two, overlapped);
#else
  printf("## vNxM: vectors of a lane, threads; aNbM: vectors asked for ahead by a thread, blocks of an SM\n");
  gated_line("swiglu", "v1x256", g1, 256, 1, 0, false, both); gated_line("silu_mul", "v1x256", g1, 256, 1, 0, true, overlapped);
  gated_line("geglu", "v1x256", g1, 256, 1, 1, false, overlapped); gated_b_line("swiglu_b", "v1x256", gb1, 256, 1, both);
  for (int res = 0; res < 2; ++res) {
    char const* op = res ? "res4096" : "rms4096";
    rms_line(op, r1, 4096, 1, 0, 0, res, both);
    rms_line(op, r2, 4096, 2, 12, 4, res, both);
    rms_line(op, r2, 4096, 2, 8, 4, res, overlapped); rms_line(op, r2, 4096, 2, 4, 4, res, overlapped);
    rms_line(op, r4, 4096, 4, 16, 6, res, overlapped); rms_line(op, r4, 4096, 4, 24, 4, res, overlapped);
    rms_line(op, r1, 4096, 1, 12, 2, res, overlapped);
    rms_line(op, r2, 4096, 2, res ? 4 : 2, 9999, res, overlapped);  // a turn a block
  }
  rms_line("rms1024", r1, 1024, 1, 0, 0, false, overlapped); rms_line("rms1024", r2, 1024, 2, 12, 8, false, overlapped);
  rms_line("rms8192", r2, 8192, 2, 12, 2, false, overlapped); rms_line("rms8192", r4, 8192, 4, 16, 3, false, overlapped);
  rms_b_line("rms_b4096", rb2, 4096, 2, 24, 1, false, two, both); rms_b_line("rms_b4096", rb2, 4096, 2, 24, 1, false, direct, both);
  for (int ahead : {16, 12, 8}) rms_b_line("rms_b4096", rb2, 4096, 2, ahead, 1, false, two, overlapped);
  for (int ahead : {12, 8, 4}) rms_b_line("rms_b4096", rb1, 4096, 1, ahead, 2, false, two, overlapped);
  rms_b_line("rms_b4096", rb1, 4096, 1, 12, 2, false, direct, overlapped); rms_b_line("rms_b4096", rb2, 4096, 2, 24, 1, false, none, overlapped);
  rms_b_line("rms_b1024", rb2, 1024, 2, 24, 1, false, as_launched, overlapped); rms_b_line("rms_b1024", rb1, 1024, 1, 12, 2, false, as_launched, overlapped);
  for (int ahead : {24, 12}) rms_b_line("rms_b8192", rb2, 8192, 2, ahead, 1, false, as_launched, overlapped);
  for (int ahead : {24, 18, 12}) rms_b_line("res_b4096", rb2, 4096, 2, ahead, 1, true, as_launched, overlapped);
  rms_b_line("res_b4096", rb1, 4096, 1, 12, 2, true, as_launched, overlapped);
#endif
}
