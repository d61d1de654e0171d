#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <set>

#include "tranche/comm/backends.h"

namespace tranche {
namespace {

TEST(SequenceHash, SeesOperationCountTypeUnitAndPhase) {
  float values[8] = {};
  const auto after = [&](const std::function<void(Communicator&)>& call) {
    const auto comm = make_self_communicator();
    call(*comm);
    return comm->sequence_hash();
  };
  const auto gather = [&](std::int64_t count, DataType dtype, OperationLabel label) {
    return after(
        [&](Communicator& comm) { comm.all_gather(values, values, count, dtype, 0, {}, label).wait(); });
  };
  std::set<std::uint64_t> hashes{
      after([](Communicator&) {}),
      gather(1, DataType::float32, {"a", "b"}),
      gather(2, DataType::float32, {"a", "b"}),
      gather(1, DataType::bfloat16, {"a", "b"}),
      gather(1, DataType::float32, {"ab", ""}),
      gather(1, DataType::float32, {"", "ab"}),
      after([&](Communicator& comm) {
        comm.broadcast(values, 1, DataType::float32, 0, {}, {"a", "b"}).wait();
      }),
  };
  EXPECT_EQ(hashes.size(), 7u);
  EXPECT_EQ(gather(1, DataType::float32, {"a", "b"}), gather(1, DataType::float32, {"a", "b"}));
}

}  // namespace
}  // namespace tranche
