// Threads of a block: their indices, barriers, warps, shared memory and tensor cores; and their errors.
#include <cmath>
#include <numeric>

#include "kernels/cuda/simt.h"
#include "tests/cuda_emulation/emulation_fixture.h"
#include "tranche/core/dtype.h"

namespace cuda_emulation {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using tranche::bfloat16;
using tranche::float16;
using tranche::kernels::cuda::cp_async_16;
using tranche::kernels::cuda::cp_async_commit;
using tranche::kernels::cuda::cp_async_wait;
using tranche::kernels::cuda::load_matrix_x4;
using tranche::kernels::cuda::multiply_accumulate_16x8x16;

constexpr unsigned all_lanes = 0xffffffffu;

class Simt : public Emulation {
 protected:
  /// Runs a kernel and waits; returns its error, if it had one.
  cudaError_t run(dim3 grid, dim3 block, std::size_t shared, std::function<void()> body) {
    const cudaError_t error = launch("probe", grid, block, shared, stream_, std::move(body));
    const cudaError_t finished = cudaStreamSynchronize(stream_);
    return error != cudaSuccess ? error : finished;
  }
  /// The diagnostic of a kernel that must fail.
  std::string failure(dim3 grid, dim3 block, std::size_t shared, std::function<void()> body) {
    EXPECT_EQ(run(grid, block, shared, std::move(body)), cudaErrorLaunchFailure);
    EXPECT_EQ(cudaPeekAtLastError(), cudaErrorLaunchFailure) << "it stays";
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaErrorLaunchFailure);
    std::string text = last_diagnostic();
    recover();
    return text;
  }
};

TEST_F(Simt, EveryThreadRunsOnceWithItsNumbers) {
  const dim3 grid(3, 2, 2), block(5, 3, 2);
  const std::size_t count = 12 * 30;
  int* seen = device(std::vector<int>(count, 0));
  ASSERT_EQ(run(grid, block, 0,
                [=] {
                  const unsigned b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
                  const unsigned t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
                  atomicAdd(&seen[b * 30 + t], 1);
                }),
            cudaSuccess);
  EXPECT_EQ(host(seen, count), std::vector<int>(count, 1));
}

// The textbook sum in shared memory, with odd sizes and every order of threads.
TEST_F(Simt, BarriersOrderSharedMemory) {
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    for (const unsigned threads : {1u, 2u, 31u, 32u, 33u, 96u, 257u, 1024u}) {
      set_seed(seed);
      int* sums = device(std::vector<int>(2, -1));
      ASSERT_EQ(run(2, threads, threads * sizeof(int),
                    [=] {
                      int* shared = static_cast<int*>(dynamic_shared());
                      __shared__ int again[1024];
                      shared[threadIdx.x] = static_cast<int>(threadIdx.x + 1);
                      __syncthreads();
                      again[threadIdx.x] = shared[blockDim.x - 1 - threadIdx.x];
                      __syncthreads();
                      if (threadIdx.x == 0) {
                        int sum = 0;
                        for (unsigned i = 0; i < blockDim.x; ++i) sum += again[i];
                        sums[blockIdx.x] = sum;
                      }
                    }),
                cudaSuccess);
      const int expected = static_cast<int>(threads * (threads + 1) / 2);
      EXPECT_EQ(host(sums, 2), std::vector<int>(2, expected)) << threads << " threads, seed " << seed;
    }
  }
}

// Without the barrier some order must reveal that it is missing; that is the purpose of the shuffling.
TEST_F(Simt, AMissingBarrierShows) {
  int wrong = 0;
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    set_seed(seed);
    int* got = device(std::vector<int>(64, -1));
    ASSERT_EQ(run(1, 64, 64 * sizeof(int),
                  [=] {
                    int* shared = static_cast<int*>(dynamic_shared());
                    shared[threadIdx.x] = static_cast<int>(threadIdx.x);
                    got[threadIdx.x] = shared[threadIdx.x ^ 1];
                  }),
              cudaSuccess);
    const std::vector<int> values = host(got, 64);
    for (int i = 0; i < 64; ++i) wrong += values[static_cast<std::size_t>(i)] != (i ^ 1);
  }
  EXPECT_GT(wrong, 0);
}

TEST_F(Simt, BarriersVote) {
  int* got = device(std::vector<int>(3 * 40, -1));
  ASSERT_EQ(run(1, 40, 0,
                [=] {
                  const int t = static_cast<int>(threadIdx.x);
                  got[t] = __syncthreads_count(t % 3 == 0);
                  got[40 + t] = __syncthreads_or(t == 39);
                  got[80 + t] = __syncthreads_and(t != 39);
                }),
            cudaSuccess);
  std::vector<int> expected(120, 14);
  std::fill(expected.begin() + 40, expected.end(), 1);
  std::fill(expected.begin() + 80, expected.end(), 0);
  EXPECT_EQ(host(got, 120), expected);
}

TEST_F(Simt, ShufflesFollowTheirDefinition) {
  int* got = device(std::vector<int>(64 * 5, -1));
  ASSERT_EQ(run(1, 64, 0,
                [=] {
                  const int t = static_cast<int>(threadIdx.x);
                  got[t] = __shfl_sync(all_lanes, t, 5, 8);
                  got[64 + t] = __shfl_xor_sync(all_lanes, t, 3);
                  got[128 + t] = __shfl_up_sync(all_lanes, t, 2, 16);
                  got[192 + t] = __shfl_down_sync(all_lanes, t, 3, 8);
                  got[256 + t] = static_cast<int>(__shfl_xor_sync(all_lanes, 0.25 * t, 16) * 4);
                }),
            cudaSuccess);
  const std::vector<int> values = host(got, 64 * 5);
  for (int t = 0; t < 64; ++t) {
    const auto at = [&](int row) { return values[static_cast<std::size_t>(64 * row + t)]; };
    EXPECT_EQ(at(0), t / 8 * 8 + 5);
    EXPECT_EQ(at(1), t ^ 3);
    EXPECT_EQ(at(2), t % 16 < 2 ? t : t - 2);
    EXPECT_EQ(at(3), t % 8 >= 5 ? t : t + 3);
    EXPECT_EQ(at(4), t ^ 16);
  }
}

TEST_F(Simt, VotesAndReductions) {
  unsigned* got = device(std::vector<unsigned>(6, 0));
  ASSERT_EQ(run(1, 32, 0,
                [=] {
                  const unsigned t = threadIdx.x;
                  const unsigned results[6] = {__ballot_sync(all_lanes, t % 3 == 1),
                                               static_cast<unsigned>(__any_sync(all_lanes, t == 31)),
                                               static_cast<unsigned>(__all_sync(all_lanes, t != 31)),
                                               __reduce_add_sync(all_lanes, t),
                                               __reduce_max_sync(all_lanes, t ^ 7),
                                               t < 8 ? __ballot_sync(0xffu, t & 1) : 0};
                  if (t == 0) std::copy(results, results + 6, got);
                }),
            cudaSuccess);
  EXPECT_EQ(host(got, 6), (std::vector<unsigned>{0x92492492u, 1, 0, 496, 31, 0xaau}));
}

// Warps take divergent branches, each with its own sequence of collectives.
TEST_F(Simt, WarpsGoTheirOwnWays) {
  int* got = device(std::vector<int>(4, -1));
  ASSERT_EQ(run(1, 128, 0,
                [=] {
                  const int warp = static_cast<int>(threadIdx.x / 32);
                  int value = 1;
                  for (int round = 0; round <= warp; ++round) {
                    for (int offset = 16; offset > 0; offset /= 2)
                      value += __shfl_xor_sync(all_lanes, value, offset);
                  }
                  if (threadIdx.x % 32 == 0) got[warp] = value;
                }),
            cudaSuccess);
  EXPECT_EQ(host(got, 4), (std::vector<int>{32, 1024, 32768, 1048576}));
}

template <class T>
void products_of_16x8x16(const std::vector<T>& a, const std::vector<T>& b, const std::vector<float>& c,
                         std::vector<float>& d) {
  for (std::size_t row = 0; row < 16; ++row) {
    for (std::size_t column = 0; column < 8; ++column) {
      float sum = c[row * 8 + column];
      for (std::size_t k = 0; k < 16; ++k) {
        sum += tranche::to_float(a[row * 16 + k]) * tranche::to_float(b[k * 8 + column]);
      }
      d[row * 8 + column] = sum;
    }
  }
}

// The fragments are filled by the definition of their layout, element by element. Then the same a is loaded
// by ldmatrix, and b from the row-major matrix by ldmatrix's transposed form.
template <class T>
class TensorCores : public Simt {};
using Halves = ::testing::Types<bfloat16, float16>;
TYPED_TEST_SUITE(TensorCores, Halves);

TYPED_TEST(TensorCores, MultiplyAsPlainLoopsDo) {
  using T = TypeParam;
  std::vector<T> a(256), b(128);
  std::vector<float> c(128), expected(128);
  unsigned state = 12345;
  const auto draw = [&state] {
    state = state * 1664525u + 1013904223u;
    return static_cast<float>(static_cast<int>(state >> 16) - 32768) / 8192.0f;
  };
  for (T& value : a) value = tranche::from_float<T>(draw());
  for (T& value : b) value = tranche::from_float<T>(draw());
  for (float& value : c) value = draw();
  products_of_16x8x16(a, b, c, expected);
  const T* da = this->template device<T>(a);
  const T* db = this->template device<T>(b);
  float* by_layout = this->template device<float>(c);
  float* by_load = this->template device<float>(c);
  ASSERT_EQ(
      this->run(1, 32, 0,
                [=] {
                  const unsigned lane = threadIdx.x, g = lane / 4, t = lane % 4;
                  const auto pack = [](T low, T high) {
                    return static_cast<std::uint32_t>(low.bits) | static_cast<std::uint32_t>(high.bits) << 16;
                  };
                  std::uint32_t fragment[4];
                  for (unsigned part = 0; part < 4; ++part) {
                    const unsigned row = g + 8 * (part % 2), column = 2 * t + 8 * (part / 2);
                    fragment[part] = pack(da[row * 16 + column], da[row * 16 + column + 1]);
                  }
                  const std::uint32_t b0 = pack(db[2 * t * 8 + g], db[(2 * t + 1) * 8 + g]);
                  const std::uint32_t b1 = pack(db[(2 * t + 8) * 8 + g], db[(2 * t + 9) * 8 + g]);
                  const auto indices = [&](unsigned i) { return (g + 8 * (i / 2)) * 8 + 2 * t + i % 2; };
                  float d[4];
                  for (unsigned i = 0; i < 4; ++i) d[i] = by_layout[indices(i)];
                  multiply_accumulate_16x8x16<T>(d, fragment, b0, b1);
                  for (unsigned i = 0; i < 4; ++i) by_layout[indices(i)] = d[i];

                  __shared__ __align__(16) T sa[16][16];
                  __shared__ __align__(16) T sb[16][8];
                  for (unsigned i = lane; i < 256; i += 32) sa[i / 16][i % 16] = da[i];
                  for (unsigned i = lane; i < 128; i += 32) sb[i / 8][i % 8] = db[i];
                  __syncwarp();
                  std::uint32_t loaded[4], columns[4];
                  load_matrix_x4<false>(loaded, &sa[lane % 16][lane / 16 * 8]);
                  load_matrix_x4<true>(columns, &sb[lane % 16][0]);  // lanes 16 and above pass the same rows
                                                                     // again, which are unused
                  for (unsigned i = 0; i < 4; ++i) d[i] = by_load[indices(i)];
                  multiply_accumulate_16x8x16<T>(d, loaded, columns[0], columns[1]);
                  for (unsigned i = 0; i < 4; ++i) by_load[indices(i)] = d[i];
                }),
      cudaSuccess);
  EXPECT_EQ(this->host(by_layout, 128), expected);
  EXPECT_EQ(this->host(by_load, 128), expected);
}

// The bytes of cp.async are present after the wait and not before it; without a source they are zeros.
TEST_F(Simt, AsyncCopiesArriveWhenWaitedFor) {
  std::vector<float> source(16);
  std::iota(source.begin(), source.end(), 1.0f);
  const float* from = device(source);
  float* got = device<float>(3 * 16);
  ASSERT_EQ(run(1, 1, 64,
                [=] {
                  float* shared = static_cast<float*>(dynamic_shared());
                  for (int i = 0; i < 4; ++i) {
                    cp_async_16(shared + 4 * i, i == 3 ? nullptr : from + 4 * i, i != 3);
                    cp_async_commit();
                  }
                  for (int i = 0; i < 16; ++i) got[i] = shared[i];
                  cp_async_wait<2>();
                  for (int i = 0; i < 16; ++i) got[16 + i] = shared[i];
                  cp_async_wait<0>();
                  for (int i = 0; i < 16; ++i) got[32 + i] = shared[i];
                }),
            cudaSuccess);
  const std::vector<float> values = host(got, 48);
  for (std::size_t i = 0; i < 16; ++i) {
    EXPECT_TRUE(std::isnan(values[i]));
    EXPECT_EQ(std::isnan(values[16 + i]), i >= 8);
    EXPECT_EQ(values[32 + i], i < 12 ? source[i] : 0.0f);
  }
}

TEST_F(Simt, SharedMemoryStartsAsNaN) {
  float* got = device<float>(2 * 8);
  float* variable = device<float>(2);
  ASSERT_EQ(run(2, 8, 32,
                [=] {
                  float* shared = static_cast<float*>(dynamic_shared());
                  got[blockIdx.x * 8 + threadIdx.x] = shared[threadIdx.x];
                  shared[threadIdx.x] = 1;
                  __shared__ float one;
                  if (threadIdx.x == 0) variable[blockIdx.x] = one;
                  __syncthreads();
                  one = 1;
                }),
            cudaSuccess);
  for (const float value : host(got, 16)) EXPECT_TRUE(std::isnan(value));
  for (const float value : host(variable, 2)) EXPECT_TRUE(std::isnan(value));
}

TEST_F(Simt, DivergentBarriersAreNamed) {
  EXPECT_THAT(failure(1, 64, 0,
                      [] {
                        if (threadIdx.x == 33) return;
                        __syncthreads();
                      }),
              AllOf(HasSubstr("kernel 'probe', block (0,0,0) of (1,1,1), thread (0,0,0)"),
                    HasSubstr("divergent barrier: 63 of 64 threads reached it; thread (33,0,0) has returned"),
                    HasSubstr("simt_test.cpp:"), HasSubstr("TRANCHE_EMULATION_SEED=1")));
  const auto two_barriers = [] {  // outside of the macro, which would put both on one line
    if (threadIdx.x == 0) {
      __syncthreads();
    } else {
      __syncthreads();
    }
  };
  EXPECT_THAT(failure(1, 2, 0, two_barriers),
              HasSubstr("divergent barrier: it waits here, and thread (0,0,0) at "));
}

TEST_F(Simt, LanesThatDoNotComeAreNamed) {
  EXPECT_THAT(failure(1, 32, 0,
                      [] {
                        if (threadIdx.x == 7) return;
                        __shfl_xor_sync(all_lanes, 1, 1);
                      }),
              AllOf(HasSubstr("__shfl_xor_sync with mask 0xffffffff waits for lanes that do not come"),
                    HasSubstr("lane 7 (has returned)")));
  EXPECT_THAT(failure(1, 20, 0, [] { __syncwarp(); }), HasSubstr("lane 20 (not in the block)"));
  EXPECT_THAT(failure(1, 32, 0,
                      [] {
                        if (threadIdx.x < 3) {
                          __ballot_sync(all_lanes, 1);
                        } else {
                          __syncthreads();
                        }
                      }),
              HasSubstr("lane 3 (at the barrier of line "));
  EXPECT_THAT(failure(1, 32, 0, [] { __ballot_sync(1, 1); }),
              HasSubstr("__ballot_sync with mask 0x00000001, which does not name the calling lane"));
  EXPECT_THAT(failure(1, 32, 0, [] { __shfl_sync(threadIdx.x < 16 ? 0xffffu : 0xffff0000u, 1, 3); }),
              HasSubstr("a shuffle reads from a lane outside its mask"));
  EXPECT_THAT(failure(1, 32, 0, [] { __shfl_xor_sync(all_lanes, 1, 1, 12); }),
              HasSubstr("not a power of two"));
}

TEST_F(Simt, MisalignedAddressesAreNamed) {
  EXPECT_THAT(failure(1, 1, 64,
                      [] {
                        auto* shared = static_cast<unsigned char*>(dynamic_shared());
                        cp_async_16(shared + 8, shared);
                      }),
              HasSubstr("cp.async of 16 bytes between misaligned addresses"));
  EXPECT_THAT(failure(1, 32, 1024,
                      [] {
                        auto* shared = static_cast<unsigned char*>(dynamic_shared());
                        std::uint32_t fragment[4];
                        load_matrix_x4<false>(fragment, shared + 16 * threadIdx.x + 4);
                      }),
              HasSubstr("ldmatrix from "));
}

#if !defined(__SANITIZE_ADDRESS__)
TEST_F(Simt, WritesBeyondSharedMemoryAreFound) {
  EXPECT_THAT(failure(1, 8, 28, [] { static_cast<int*>(dynamic_shared())[threadIdx.x] = 1; }),
              HasSubstr("wrote beyond its 28 bytes of dynamic shared memory"));
  EXPECT_THAT(failure(1, 1, 28, [] { static_cast<int*>(dynamic_shared())[-1] = 1; }),
              HasSubstr("wrote before its 28"));
}
#else
TEST_F(Simt, WritesBeyondSharedMemoryAreFound) {
  EXPECT_DEATH(run(1, 8, 28, [] { static_cast<volatile int*>(dynamic_shared())[threadIdx.x] = 1; }),
               "use-after-poison");
}
#endif

TEST_F(Simt, OtherFailuresInKernels) {
  EXPECT_THAT(failure(1, 3, 0,
                      [] {
                        if (threadIdx.x == 2) __trap();
                      }),
              AllOf(HasSubstr("thread (2,0,0)"), HasSubstr("__trap() was called")));
  EXPECT_THAT(failure(1, 1, 0, [] { throw std::runtime_error("from inside"); }),
              HasSubstr("an exception left the kernel: from inside"));
  // After recover() the stream continues with clean threads.
  int* got = device(std::vector<int>(1, 0));
  EXPECT_EQ(run(1, 1, 0, [=] { *got = 5; }), cudaSuccess);
  EXPECT_EQ(host(got, 1), std::vector<int>{5});
}

TEST_F(Simt, LaunchesBeyondTheLimitsAreRefused) {
  const auto refused = [&](dim3 grid, dim3 block, std::size_t shared) {
    EXPECT_EQ(launch("large", grid, block, shared, stream_, [] {}), cudaErrorInvalidConfiguration);
    EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidConfiguration);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "a refused launch does not stay";
    return last_diagnostic();
  };
  EXPECT_THAT(refused(1, 1025, 0), HasSubstr("launch of kernel 'large': block (1025,1,1) is over the limit"));
  EXPECT_THAT(refused(1, dim3(1, 1, 65), 0), HasSubstr("over the limit"));
  EXPECT_THAT(refused(1, dim3(64, 64, 1), 0), HasSubstr("over the limit"));
  EXPECT_THAT(refused(dim3(1, 65536), 1, 0), HasSubstr("grid (1,65536,1) is over the limit"));
  EXPECT_THAT(refused(dim3(1, 1, 65536), 1, 0), HasSubstr("over the limit"));
  EXPECT_THAT(refused(dim3(0), 1, 0), HasSubstr("must not have a zero"));
  EXPECT_THAT(refused(1, 1, 227 * 1024 + 1),
              HasSubstr("232449 bytes of dynamic shared memory are over the limit"));
  EXPECT_EQ(launch("none", 1, 1, 0, nullptr, [] {}), cudaErrorInvalidResourceHandle);
  EXPECT_THAT(last_diagnostic(), HasSubstr("the default stream is not emulated"));
}

TEST_F(Simt, Intrinsics) {
  unsigned* got = device<unsigned>(8);
  ASSERT_EQ(run(1, 1, 0,
                [=] {
                  got[0] = __umulhi(0x80000000u, 6);
                  got[1] = static_cast<unsigned>(__clz(1));
                  got[2] = static_cast<unsigned>(__ffs(8));
                  got[3] = __byte_perm(0x33221100u, 0x77665544u, 0x7310u);
                  got[4] = __funnelshift_l(0x80000000u, 1u, 1);
                  got[5] = __float_as_uint(__fmaf_rn(1.5f, 2.0f, 0.25f));
                  got[6] = static_cast<unsigned>(__umul64hi(1ull << 63, 6));
                  got[7] = atomicMax(&got[0], 9u);
                }),
            cudaSuccess);
  EXPECT_EQ(host(got, 8), (std::vector<unsigned>{9, 31, 4, 0x77331100u, 3, 0x40500000u, 3, 3}));
}

}  // namespace
}  // namespace cuda_emulation
