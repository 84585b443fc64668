// Kernels on rows, bf16: us and the share of a copy's rate, by variant. -DOLD: the kernels before; -DHINT=n: cache hints,
// which run.sh writes into a copy of the sources.
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
#ifdef OLD
K(g_old, gated, GP, (128), bf) K(gb_old, gated_backward, GB, (128), bf)
K(r_old, rms_norm, RP, (128, 5), bf) K(rb_old, rms_norm_backward, RB, (512, 1), bf)
#else
K(g1, gated, GP, (512), bf, 1) K(g2, gated, GP, (256), bf, 2)
#if HINT == 0
K(g4, gated, GP, (128), bf, 4)
#endif
K(gb1, gated_backward, GB, (512), bf, 1)
#if HINT == 0
K(gb2, gated_backward, GB, (256), bf, 2)
K(r4_64, rms_norm, RP, (256, 4), bf, 4) K(r4_48, rms_norm, RP, (256, 5), bf, 4)
K(r2_48, rms_norm, RP, (256, 5), bf, 2) K(r2_64, rms_norm, RP, (512, 2), bf, 2)
#endif
K(r2_40, rms_norm, RP, (512, 3), bf, 2)
K(rb1, rms_norm_backward, RB, (1024, 1), bf)
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
template <class P> void go(void (*k)(P), int64_t grid, int block, P const& p) {
  cudaLaunchConfig_t c{}; cudaLaunchAttribute a{};
  c.gridDim = dim3(unsigned(grid)); c.blockDim = dim3(block); c.stream = stream;
  a.id = cudaLaunchAttributeProgrammaticStreamSerialization; a.val.programmaticStreamSerializationAllowed = 1;
  c.attrs = &a; c.numAttrs = pdl;
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
// run(bytes) gives the launch for tensors of so many bytes; moved: tensors that move; check: after one launch at 1 MiB.
void line(char const* op, std::string name, int tensors, std::function<Launch(int64_t)> run, std::function<void(int64_t)> check, bool wide = true) {
  for (int mode = 0; mode < (wide ? 2 : 1); ++mode) {
#ifdef OLD
    if (mode) break;
#endif
    pdl = mode;
    float zero = 0, found; CK(cudaMemcpyToSymbol(worst, &zero, 4));
    for (int i = 0; i < 3; ++i) { run(4 << 20)(0); run(1 << 20)(0); }
    check(1 << 20); CK(cudaDeviceSynchronize()); CK(cudaMemcpyFromSymbol(&found, worst, 4));
    printf("%-9s %-11s%s", op, name.c_str(), mode ? "+pdl" : "    ");
    static float copies[8][4];
    for (int s = 0; s < 4; ++s) {
      int64_t b = kSizes[s];
      float& copy = copies[tensors][s];
      if (!copy) copy = timed([&](int64_t at) { CK(cudaMemcpyAsync(A[0] + at / 2 * tensors, A[1] + at / 2 * tensors, b * tensors / 2, cudaMemcpyDeviceToDevice, stream)); }, b, tensors);
      float us = timed(run(b), b, tensors);
      printf(" %7.2f %4.0f%%", us, 100 * copy / us);
    }
    printf(" err %.1e\n", found);
  }
  fflush(stdout);
}
void describe(RowsParams& p, int64_t rows, int dim) {
  p.sizes[0] = p.sizes[1] = 1; p.sizes[2] = rows; p.dim = dim; p.rows = int(rows);
  p.by_middle = Divisor(1); p.by_inner = Divisor(int(rows));
#ifndef OLD
  p.flat = true;
#endif
}
int log2_up(int64_t n) { int k = 0; while ((1ll << k) < n) ++k; return k; }

template <class P> void gated_setup(P& p, int64_t elements, bool packed) {
  int dim = packed ? 4096 : int(elements); int64_t rows = packed ? elements / 4096 : 1;
  describe(p, rows, dim); p.chunks = dim / 8; p.aligned = true; p.by_chunks = Divisor(p.chunks);
  p.gate_stride = p.up_stride = {0, 0, packed ? 8192 : 0}; p.out_stride = {0, 0, packed ? 4096 : 0}; p.activation = Activation::silu;
}
void gated_line(char const* op, std::string name, void (*k)(GP), int block, int v, int kind, bool packed, bool wide = true) {
  line(op, name, 3, [=](int64_t b) -> Launch {
    return [=](int64_t at) {
      GP p{}; int64_t n = b / 2; gated_setup(p, n, packed);
      if (packed) { p.gate = A[0] + 2 * at; p.up = A[0] + 2 * at + 4096; p.out = A[2] + at; }
      else { p.gate = A[0] + at; p.up = A[1] + at; p.out = A[2] + at; }
      p.activation = kind ? Activation::gelu_tanh : Activation::silu;
      int64_t all = int64_t(p.rows) * p.chunks; int vv = v, bl = block;
#ifdef OLD
      p.many = all >= (1 << 18); vv = p.many ? 4 : 1; bl = 128;
#endif
      go(k, (all + bl * vv - 1) / (bl * vv), bl, p);
    }; }, [=](int64_t b) { int64_t n = b / 2;
      if (packed) ref_gated<<<256, 256>>>(A[0], A[0] + 4096, 8192, A[2], n / 4096, 4096, kind);
      else ref_gated<<<256, 256>>>(A[0], A[1], n, A[2], 1, int(n), kind); }, wide);
}
void gated_b_line(char const* op, std::string name, void (*k)(GB), int block, int v, bool wide = true) {
  line(op, name, 5, [=](int64_t b) -> Launch {
    return [=](int64_t at) {
      GB p{}; gated_setup(p, b / 2, false);
      p.gate = A[0] + at; p.up = A[1] + at; p.dout = A[2] + at; p.dgate = A[3] + at; p.dup = A[4] + at;
      int64_t all = int64_t(p.rows) * p.chunks; int vv = v, bl = block;
#ifdef OLD
      p.many = all >= (1 << 18); vv = p.many ? 2 : 1; bl = 128;
#endif
      go(k, (all + bl * vv - 1) / (bl * vv), bl, p);
    }; }, [=](int64_t b) { ref_gated_b<<<256, 256>>>(A[0], A[1], A[2], A[3], A[4], b / 2); }, wide);
}
void rms_line(char const* op, std::string name, void (*k)(RP), int dim, int v, int block, bool res, bool wide = true) {
  line(op, name, res ? 4 : 2, [=](int64_t b) -> Launch {
    return [=](int64_t at) {
      RP p{}; int64_t rows = b / 2 / dim; describe(p, rows, dim);
      p.x = A[0] + at; p.out = A[2] + at; p.weight = W; if (res) { p.residual = A[1] + at; p.sum = A[3] + at; }
      p.x_stride = p.out_stride = p.residual_stride = p.sum_stride = {0, 0, dim}; p.eps = 1e-6f; p.out_type = p.weight_type = DType::bfloat16;
      int chunks = dim / 8; p.per_dim = 1.f / dim; p.walk = Walk::kept;
      p.vectors = v; p.lanes_log2 = log2_up(chunks / v); int bl = block;
#ifdef OLD
      bool many = rows * chunks >= (1 << 18); p.lanes_log2 = std::min(7, log2_up(many ? chunks / 4 : chunks)); p.vectors = chunks >> p.lanes_log2; bl = 128;
#endif
      go(k, ((rows << p.lanes_log2) + bl - 1) / bl, bl, p);
    }; }, [=](int64_t b) { ref_rms<<<int(b / 2 / dim), 32>>>(A[0], res ? A[1] : nullptr, W, A[2], dim); }, wide);
}
void rms_b_line(char const* op, std::string name, void (*k)(RB), int dim, int block, int per_sm, bool sum, bool dw, bool wide = true) {
  line(op, name, sum ? 4 : 3, [=](int64_t b) -> Launch {
    return [=](int64_t at) {
      RB p{}; int64_t rows = b / 2 / dim; describe(p, rows, dim);
      p.x = A[0] + at; p.dout = A[1] + at; p.dx = A[2] + at; if (sum) p.dsum = A[3] + at;
      p.weight = W; p.rstd = rstd; p.dweight = dw ? DW : nullptr; p.partial = partial;
      p.x_stride = p.dout_stride = p.dx_stride = p.dsum_stride = {0, 0, dim}; p.out_type = p.weight_type = DType::bfloat16;
      int chunks = dim / 8; p.per_dim = 1.f / dim; p.walk = Walk::kept; p.lanes_log2 = log2_up(chunks); int bl = block;
#ifdef OLD
      bool many = rows * chunks >= (1 << 18); p.lanes_log2 = std::min(9, log2_up(many ? chunks / 2 : chunks)); p.vectors = chunks >> p.lanes_log2; bl = 512;
#endif
      int64_t blocks = ((rows << p.lanes_log2) + bl - 1) / bl;
      p.parts = int(std::min<int64_t>(132 * per_sm, blocks));
      go(k, dw ? p.parts : blocks, bl, p);
      if (dw) go(rw, (dim + 31) / 32, 128, p);
    }; }, [=](int64_t b) { int rows = int(b / 2 / dim); ref_rms_b<<<rows, 32>>>(A[0], A[1], sum ? A[3] : nullptr, W, rstd, A[2], dim);
      if (dw) ref_rms_w<<<dim / 32, 32>>>(A[0], A[1], rstd, DW, rows, dim); }, wide);
}
int main() {
  CK(cudaStreamCreate(&stream));
  for (int i = 0; i < 6; ++i) { int64_t n = i < 2 ? 3 * kArena : kArena; CK(cudaMalloc(&A[i], n)); fill<<<1024, 256>>>(A[i], n / 2, 77u * i); }
  CK(cudaMalloc(&W, 65536)); CK(cudaMalloc(&DW, 65536)); fill<<<64, 256>>>(W, 32768, 5); CK(cudaMalloc(&partial, 64 << 20)); CK(cudaMalloc(&rstd, 4 << 20)); fill_f<<<64, 256>>>(rstd, 1 << 20);
  CK(cudaDeviceSynchronize());
#ifdef OLD
  printf("## old; columns: 64 KiB, 1 MiB, 64 MiB, 256 MiB of a tensor: us, share of the copy\n");
  gated_line("swiglu", "old", g_old, 128, 4, 0, false); gated_line("silu_mul", "old", g_old, 128, 4, 0, true); gated_line("geglu", "old", g_old, 128, 4, 1, false);
  gated_b_line("swiglu_b", "old", gb_old, 128, 2);
  rms_line("rms4096", "old", r_old, 4096, 4, 128, false); rms_line("res4096", "old", r_old, 4096, 4, 128, true);
  rms_b_line("rms_b4096", "old", rb_old, 4096, 512, 2, false, true); rms_b_line("res_b4096", "old", rb_old, 4096, 512, 2, true, true);
#elif HINT == 0
  printf("## new, ldcs\n");
  gated_line("swiglu", "v1x128", g1, 128, 1, 0, false, false); gated_line("swiglu", "v1x256", g1, 256, 1, 0, false);
  gated_line("swiglu", "v2x128", g2, 128, 2, 0, false, false); gated_line("swiglu", "v2x256", g2, 256, 2, 0, false); gated_line("swiglu", "v4x128", g4, 128, 4, 0, false, false);
  gated_line("silu_mul", "v1x256", g1, 256, 1, 0, true, false); gated_line("silu_mul", "v2x256", g2, 256, 2, 0, true, false);
  gated_line("geglu", "v1x256", g1, 256, 1, 1, false, false); gated_line("geglu", "v2x256", g2, 256, 2, 1, false, false);
  gated_b_line("swiglu_b", "v1x128", gb1, 128, 1, false); gated_b_line("swiglu_b", "v1x256", gb1, 256, 1); gated_b_line("swiglu_b", "v2x256", gb2, 256, 2, false);
  rms_line("rms4096", "r40v2x256", r2_40, 4096, 2, 256, false); rms_line("rms4096", "r40v1x512", r2_40, 4096, 1, 512, false, false);
  rms_line("rms4096", "r48v2x256", r2_48, 4096, 2, 256, false, false);
  rms_line("rms4096", "r48v4x128", r4_48, 4096, 4, 128, false, false); rms_line("rms4096", "r64v4x128", r4_64, 4096, 4, 128, false);
  rms_line("rms8192", "r40v2x512", r2_40, 8192, 2, 512, false, false); rms_line("rms8192", "r64v4x256", r4_64, 8192, 4, 256, false, false);
  rms_line("res4096", "r40v2x256", r2_40, 4096, 2, 256, true); rms_line("res4096", "r64v2x256", r2_64, 4096, 2, 256, true, false); rms_line("res4096", "r64v4x128", r4_64, 4096, 4, 128, true, false);
  rms_b_line("rms_b4096", "512", rb1, 4096, 512, 2, false, true); rms_b_line("rms_b4096", "512,no dw", rb1, 4096, 512, 2, false, false, false);
  rms_b_line("rms_b8192", "1024", rb1, 8192, 1024, 1, false, true); rms_b_line("res_b4096", "512", rb1, 4096, 512, 2, true, true);
#else
  printf("## new, hint %d (1 plain, 2 no L1 and 256 B of L2, 3 plain and st.cs)\n", HINT);
  gated_line("swiglu", "v1x256", g1, 256, 1, 0, false, false); gated_b_line("swiglu_b", "v1x256", gb1, 256, 1, false); rms_line("rms4096", "r40v2x256", r2_40, 4096, 2, 256, false, false); rms_b_line("rms_b4096", "512", rb1, 4096, 512, 2, false, true, false);
#endif
}
