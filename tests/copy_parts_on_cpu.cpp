// SPDX-License-Identifier: Apache-2.0
//
// The pack kernel compiled for the CPU: a warp is 32 threads, its votes and barriers are real ones.
// Built by test_copy_kernel.py, which prepends copy_parts.cu's path as KERNEL.

#include <algorithm>
#include <barrier>
#include <cstring>
#include <thread>
#include <vector>

using std::max;
using std::min;

#define __device__
#define __noinline__
#define __global__
#define __shared__ static
#define __launch_bounds__(...)

struct int2 { int x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct Index { unsigned x; };

static thread_local Index threadIdx;
static Index blockIdx;
static std::barrier warp_barrier(32);
static bool votes[32];

static void __syncwarp() { warp_barrier.arrive_and_wait(); }
static unsigned __ballot_sync(unsigned, bool vote) {
  votes[threadIdx.x % 32] = vote;
  __syncwarp();
  unsigned result = 0;
  for (int lane = 0; lane < 32; ++lane) result |= (unsigned)votes[lane] << lane;
  __syncwarp();
  return result;
}
static int __popc(unsigned x) { return __builtin_popcount(x); }
static unsigned __umulhi(unsigned a, unsigned b) { return (unsigned long long)a * b >> 32; }
static unsigned __funnelshift_r(unsigned low, unsigned high, unsigned bits) {
  return ((unsigned long long)high << 32 | low) >> bits;
}
static float __uint_as_float(unsigned x) { float f; std::memcpy(&f, &x, 4); return f; }
static unsigned __float_as_uint(float f) { unsigned x; std::memcpy(&x, &f, 4); return x; }

#include KERNEL

extern "C" void launch(const i64* rows, const i64* shapes, const int* first_tile, const int2* hints, int count,
                       int tiles) {
  int blocks = (tiles + WARPS_PER_BLOCK - 1) / WARPS_PER_BLOCK;
  for (int block = 0; block < blocks; ++block)
    for (int warp = 0; warp < WARPS_PER_BLOCK; ++warp) {
      blockIdx.x = block;
      std::vector<std::thread> lanes;
      for (int lane = 0; lane < WARP; ++lane)
        lanes.emplace_back([=] {
          threadIdx.x = warp * WARP + lane;
          copy_parts(rows, shapes, first_tile, hints, count, tiles);
        });
      for (auto& lane : lanes) lane.join();
    }
}
