#pragma once
/// Sums whose order is part of the contract: deterministic (fixed-order) sums over ranks, norms, digests.
/// matmul.h describes how calls run and how long operands stay valid.

#include <cstdint>
#include <span>

#include "tranche/core/exact_sum.h"
#include "tranche/core/tensor_view.h"
#include "tranche/device/stream.h"

namespace tranche::kernels {

/// The way in which a CPU writes a sum. caches: ordinary stores, for a sum that is read soon; memory:
/// non-temporal stores, for one that is not, which leave the caches to other data. GPUs ignore it; the bits
/// are the same.
enum class SumTarget { caches, memory };

/// The groups of a sum over ranks. A number stands for groups of so many ranks.
struct SumGroups {
  // NOLINTNEXTLINE(google-explicit-constructor)
  SumGroups(int ranks, int groups = 1) : size(ranks), outer(groups) {}
  int size;   ///< ranks in a group
  int outer;  ///< groups in an outer group, at least 1
};

/// The sum over ranks of docs/internals/arithmetic.md: pieces[r] holds rank r's elements in `piece_dtype`.
/// They are summed in fp32 in rank order inside groups of `groups.size` consecutive ranks, then over the
/// groups in order: ((p0 + p1) + p2) + (p3 + p4) for five ranks and groups of three. The groups' sums are
/// added inside outer groups first: ((p0 + p1) + (p2 + p3)) + (p4 + p5) for six ranks and {2, 2}. With
/// accumulate, out = out + sum (one addition), else out = sum; out is fp32 or 16-bit (rounded once) and may
/// alias one of `pieces` if it has the same dtype. A size of 0 folds: with accumulate, ranks are added to out
/// one by one, ((out + p0) + p1) + p2, so that several calls have the bits of one call with all ranks. A
/// negative size -g folds sums of g consecutive ranks: (out + (p0 + p1)) + (p2 + p3) for -2. With outer
/// groups a fold adds their sums to out.
void ordered_sum(Stream& stream, std::span<const void* const> pieces, DataType piece_dtype, SumGroups groups,
                 bool accumulate, const TensorView& out, SumTarget target = SumTarget::caches);

/// Does the work of a reduce-scatter of one rank, in one pass without intermediate memory: rounds source to
/// the dtype `communication`, then writes it to out (with accumulate: adds it). source is fp32 and may be
/// out; out is fp32 or 16-bit (rounded once). The CPU uses non-temporal stores.
void rounded_sum(Stream& stream, const ConstTensorView& source, DataType communication, bool accumulate,
                 const TensorView& out);

/// One shard's part of the norm and of the finite check; it lives in device memory and takes 176 bytes.
struct GradientStatistics {
  SquareSum squares;                   ///< without rounding; meaningful if all elements are finite
  std::int64_t first_non_finite = -1;  ///< lowest index of an infinity or NaN; -1 if none
};
/// Writes *statistics from gradient (any floating dtype). Each square is exact and is added without rounding:
/// neither the position of an element nor the division into shards and buffers changes a bit. The limbs of
/// `squares` are normalized.
void gradient_statistics(Stream& stream, const ConstTensorView& gradient, GradientStatistics* statistics);

/// Two 64-bit words, each the wrapping sum over elements of a mix of (tensor index, element index, bits of
/// the value as fp32). The sum does not depend on how the elements are divided or ordered.
struct Digest {
  std::uint64_t lanes[2] = {0, 0};
  constexpr Digest& operator+=(const Digest& other) {
    lanes[0] += other.lanes[0];
    lanes[1] += other.lanes[1];
    return *this;
  }
  friend bool operator==(const Digest&, const Digest&) = default;
};
/// *digest += the digest of values (any floating dtype, widened to fp32), which are elements from
/// first_element on of tensor `tensor`. All NaNs count as one value.
void add_digest(Stream& stream, const ConstTensorView& values, std::uint64_t tensor,
                std::int64_t first_element, Digest* digest);

}  // namespace tranche::kernels
