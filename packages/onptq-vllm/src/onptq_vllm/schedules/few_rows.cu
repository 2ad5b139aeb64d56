// A few rows of activations in 16 bits times codes of four bits, which lie as humming lays them out:
//
//     y[r, n] = step[n] * sum over k of x[r, k] * (code[n, k] - 8)  +  bias[n]
//
// or, where GROUP columns share a step, with step[n, k / GROUP] inside the sum, multiplied with the code in 16 bits.
//
// Such a product waits for its codes. Here every warp keeps DEPTH loads of 512 bytes on their way and asks for the first of
// them before the kernel before this one has ended; WARPS warps of CLUSTER blocks share the columns of 64 outputs.
//
// Defined before this text: N, K, GROUP (0: all columns of an output), WARPS, CLUSTER, DEPTH, and BFLOAT16 (else values are float16).

constexpr unsigned OUTPUTS = 64, COLUMNS = 16, ROWS = 8;  // of a warp's step; rows are the columns of its mma
constexpr unsigned STEPS = K / COLUMNS, STRIDE = WARPS * CLUSTER;

__device__ __forceinline__ uint4 codes_at(const uint4 *place) {
  uint4 found;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w)
               : "l"(place));
  return found;
}

__device__ __forceinline__ unsigned masked(unsigned word, unsigned mask, unsigned base) {
  unsigned found;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(found) : "r"(word), "r"(mask), "r"(base));
  return found;
}

__device__ __forceinline__ unsigned fma_pair(unsigned a, unsigned b, unsigned c) {
  unsigned found;
#ifdef BFLOAT16
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(found) : "r"(a), "r"(b), "r"(c));
#else
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(found) : "r"(a), "r"(b), "r"(c));
#endif
  return found;
}

// Of a word the four pairs of neighboring columns, less 8: outputs g and columns 0.., 8.., outputs g + 8 and the same columns.
// A code is put into the low bits of a number's mantissa, which adds it to that number.
__device__ __forceinline__ void values_of(unsigned word, unsigned (&pairs)[4]) {
#ifdef BFLOAT16
  constexpr unsigned ONE = 0x3F803F80, BASE = 0x43004300, LESS = 0xC308C308;  // 1, 128, -136
  for (unsigned p = 0; p < 4; p++) pairs[p] = fma_pair(masked(word >> (4 * p), 0x000F000F, BASE), ONE, LESS);
#else
  constexpr unsigned ONE = 0x3C003C00, BASE = 0x64006400, LESS = 0xE408E408;  // 1, 1024, -1032
  constexpr unsigned SIXTEENTH = 0x2C002C00, LESS_HIGH = 0xD480D480;          // 1/16, -72
  unsigned later = word >> 8;
  pairs[0] = fma_pair(masked(word, 0x000F000F, BASE), ONE, LESS);
  pairs[1] = fma_pair(masked(word, 0x00F000F0, BASE), SIXTEENTH, LESS_HIGH);
  pairs[2] = fma_pair(masked(later, 0x000F000F, BASE), ONE, LESS);
  pairs[3] = fma_pair(masked(later, 0x00F000F0, BASE), SIXTEENTH, LESS_HIGH);
#endif
}

__device__ __forceinline__ unsigned multiplied(unsigned pair, unsigned one) {
  unsigned found;
#ifdef BFLOAT16
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(found) : "r"(pair), "r"(one));
#else
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(found) : "r"(pair), "r"(one));
#endif
  return found;
}

// `steps` are those of outputs g and g + 8 in the group of these columns.
__device__ __forceinline__ void multiply(float (&sum)[4], unsigned word, uint2 x, unsigned steps) {
  unsigned a[4];
  values_of(word, a);
  if (GROUP) {
    const unsigned low = __byte_perm(steps, 0, 0x1010), high = __byte_perm(steps, 0, 0x3232);
    a[0] = multiplied(a[0], low), a[1] = multiplied(a[1], low);
    a[2] = multiplied(a[2], high), a[3] = multiplied(a[3], high);
  }
#ifdef BFLOAT16
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#endif
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[2]), "r"(a[1]), "r"(a[3]), "r"(x.x), "r"(x.y));
}

__device__ __forceinline__ float widened(unsigned short value) {
  float found;
#ifdef BFLOAT16
  found = __uint_as_float(static_cast<unsigned>(value) << 16);
#else
  asm("cvt.f32.f16 %0, %1;" : "=f"(found) : "h"(value));
#endif
  return found;
}

__device__ __forceinline__ unsigned short narrowed(float value) {
  unsigned short found;
#ifdef BFLOAT16
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(found) : "f"(value));
#else
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(found) : "f"(value));
#endif
  return found;
}

__device__ __forceinline__ void arrive() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }

__device__ __forceinline__ void await_all() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// Into the shared memory of the cluster's first block.
__device__ __forceinline__ void give(float *place, float value) {
  unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(place));
  asm("mapa.shared::cluster.u32 %0, %0, 0;" : "+r"(at));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(at), "f"(value) : "memory");
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(WARPS * 32)
    few_rows(const uint4 *codes, const unsigned *x, const unsigned short *steps, const unsigned short *bias,
             unsigned short *y, unsigned rows) {
  __shared__ float parts[WARPS][ROWS][OUTPUTS];
  __shared__ float given[CLUSTER][ROWS * OUTPUTS];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, rank = blockIdx.x, tile = blockIdx.y;
  const unsigned group = lane / 4, quarter = lane % 4, first = rank * WARPS + warp;
  const uint4 *own = codes + tile * (OUTPUTS / 2) + lane;
  const unsigned *row = x + min(group, rows - 1) * (K / 2) + quarter;
  auto load = [&](unsigned step) { return codes_at(own + static_cast<size_t>(step) * (N / 2)); };
  auto values = [&](unsigned step) {
    const unsigned *at = row + step * (COLUMNS / 2);
    return make_uint2(at[0], at[4]);
  };

  // Steps of groups lie such that the eight of a thread's outputs, g, g + 8, g + 16 and so on, are side by side.
  auto steps_at = [&](unsigned step) {
    const unsigned short *row = steps + static_cast<size_t>(step * COLUMNS / max(1u, GROUP)) * N;
    return GROUP ? __ldg(reinterpret_cast<const uint4 *>(row + tile * OUTPUTS + 8 * group)) : uint4{};
  };
  auto finish = [&](unsigned i, float sum) {
    const unsigned n = tile * OUTPUTS + i % OUTPUTS;
    const unsigned place = n / 32 * 32 + n % 8 / 2 * 8 + n % 32 / 8 * 2 + n % 2;  // of steps and biases, as humming lays them out
    if (!GROUP) sum *= widened(steps[place]);
    y[i / OUTPUTS * N + n] = narrowed(sum + (bias ? widened(bias[place]) : 0));
  };

  if (CLUSTER > 1) arrive();  // who has begun can be given something
  uint4 held[DEPTH], scales[DEPTH];
  uint2 near[DEPTH];
#pragma unroll
  for (unsigned d = 0; d < DEPTH; d++)
    if (first + d * STRIDE < STEPS) held[d] = load(first + d * STRIDE), scales[d] = steps_at(first + d * STRIDE);
  asm volatile("griddepcontrol.wait;" ::: "memory");  // for x; codes are there from the start
#pragma unroll
  for (unsigned d = 0; d < DEPTH; d++)
    if (first + d * STRIDE < STEPS) near[d] = values(first + d * STRIDE);

  float sums[4][4] = {};
  for (unsigned begin = first; begin < STEPS; begin += DEPTH * STRIDE) {
#pragma unroll
    for (unsigned d = 0; d < DEPTH; d++) {
      const unsigned step = begin + d * STRIDE, next = step + DEPTH * STRIDE;
      if (step >= STEPS) break;
      const uint4 word = held[d], scale = scales[d];
      const uint2 value = near[d];
      if (next < STEPS) held[d] = load(next), scales[d] = steps_at(next), near[d] = values(next);
      multiply(sums[0], word.x, value, scale.x);
      multiply(sums[1], word.y, value, scale.y);
      multiply(sums[2], word.z, value, scale.z);
      multiply(sums[3], word.w, value, scale.w);
    }
  }

#pragma unroll
  for (unsigned one = 0; one < 4; one++)
#pragma unroll
    for (unsigned c = 0; c < 4; c++)
      if (const unsigned r = 2 * quarter + c % 2; r < rows) parts[warp][r][16 * one + 8 * (c / 2) + group] = sums[one][c];
  __syncthreads();
  if (CLUSTER > 1) await_all();
  for (unsigned i = threadIdx.x; i < rows * OUTPUTS; i += WARPS * 32) {
    float sum = 0;
#pragma unroll
    for (unsigned w = 0; w < WARPS; w++) sum += parts[w][i / OUTPUTS][i % OUTPUTS];
    if (CLUSTER > 1) give(&given[rank][i], sum);
    else finish(i, sum);
  }
  if (CLUSTER == 1) return;
  arrive();
  if (rank) return;
  await_all();
  for (unsigned i = threadIdx.x; i < rows * OUTPUTS; i += WARPS * 32) {
    float sum = 0;
#pragma unroll
    for (unsigned one = 0; one < CLUSTER; one++) sum += given[one][i];
    finish(i, sum);
  }
}
