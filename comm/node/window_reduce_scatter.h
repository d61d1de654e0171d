#pragma once
/// Reduce-scatter among ranks that read each other's memory. Private to comm/.

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "comm/node/window_exchange.h"

namespace tranche::comm {

/// output = the deterministic sum of this rank's parts from the first `givers` members.
class WindowReduceScatter : public WindowExchange {
 public:
  /// Writes the sum of pieces[member], `count` elements each, to `out`.
  using Combine = std::function<void(std::span<const void* const> pieces, void* out, std::int64_t count)>;
  struct Output {
    void* data = nullptr;
    std::int64_t width = 0;  ///< bytes of an element
  };
  WindowReduceScatter(OperationInfo info, WindowCall call, Output output, int givers, Combine combine);

 private:
  void fill(std::int64_t chunk, unsigned char* slot) override;
  Progress work(std::int64_t chunk) override;

  Output output_;
  int givers_;
  Combine combine_;
  std::int64_t summed_ = 0;  ///< elements of the current chunk
};

/// Results are written past the caches from this size on.
inline constexpr std::int64_t streamed_bytes = 1 << 20;

}  // namespace tranche::comm
