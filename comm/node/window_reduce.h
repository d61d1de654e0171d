#pragma once
/// Reduce-scatter among ranks that read each other's memory.

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "comm/node/window_exchange.h"

namespace tranche::comm {

/// output = ordered sum of the members' pieces for this rank.
///
/// When ranks outnumber cores some are scheduled late, and the others would end early and wait. So a rank
/// that has summed its own part goes on with blocks of its peers' parts, straight into their outputs, and
/// tells that it has done only when no block is left to claim. The bits are those of the owner's own sum.
class WindowReduce : public WindowExchange {
 public:
  /// Writes the sum of pieces[member], `count` elements each, to `out`.
  using Combine = std::function<void(std::span<const void* const> pieces, void* out, std::int64_t count)>;
  struct Output {
    void* data = nullptr;
    std::int64_t width = 0;  ///< bytes of an element
  };
  WindowReduce(OperationInfo info, WindowCall call, Output output, Combine combine);
  ~WindowReduce() override;
  void abandon(Slab& slab) override;

  /// Completes a call with what lets peers help, where its output is such that they can. `form` tells calls
  /// apart whose sums are taken in other ways.
  static void offer(WindowCall& call, const Output& output, std::int64_t form);

 private:
  void fill(std::int64_t chunk, unsigned char* lane) override;
  Progress work(std::int64_t chunk) override;
  Progress work_together();
  enum class Block { summed, none_left, withdrawn };
  Block sum_block_of(int member);
  void close_share();

  Output output_;
  Combine combine_;
  std::int64_t summed_ = 0;   ///< elements of the chunk
  std::int64_t claimed_ = 0;  ///< blocks, where there is no share
  int worked_for_ = 0;        ///< members of which no block is left, from this one on
  bool open_ = false;         ///< the share
};

}  // namespace tranche::comm
