#pragma once
/// Reduce-scatter across nodes. Private to comm/.

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/node/hierarchical_exchange.h"
#include "comm/node/reduce_plan.h"
#include "tranche/device/stream.h"

namespace tranche::comm {

/// The deterministic reduction of docs/internals/arithmetic.md, bit for bit, for any distribution of ranks
/// over nodes. The ranks of a node divide among them the sums that leave it.
class HierarchicalReduceScatter : public HierarchicalExchange {
 public:
  struct Result {
    void* output = nullptr;
    DataType dtype = DataType::float32;
    ReductionOptions order;
    Stream* stream = nullptr;
  };
  HierarchicalReduceScatter(OperationInfo info, WindowCall call, HierarchicalCall whole,
                            std::shared_ptr<const ReducePlan> plan, const Result& result);

 private:
  void fill(std::int64_t chunk, unsigned char* slot) override;
  Progress stage(std::int64_t chunk) override;
  Progress work(std::int64_t chunk) override;
  void start_transfer(std::int64_t chunk);
  bool sum(std::int64_t chunk);
  PeerMapping piece(int local, int destination, std::int64_t chunk, std::int64_t first) const;
  const unsigned char* own_piece(int destination, std::int64_t chunk) const;
  unsigned char* sent_sums(std::int64_t chunk, std::size_t index) const;
  unsigned char* arrivals(std::int64_t chunk) const;

  std::shared_ptr<const ReducePlan> plan_;
  Result result_;
  std::vector<int> destinations_;
  std::size_t summed_for_ = 0;  ///< number of destinations whose sums are done
  bool started_ = false, summed_ = false;
};

}  // namespace tranche::comm
