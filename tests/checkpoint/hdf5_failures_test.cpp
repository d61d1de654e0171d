// HDF5 fails while it lays out a file of a checkpoint in memory.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <string>

#include "checkpoint/hdf5_image.h"
#include "failing_hdf5.h"
#include "sample.h"

namespace tranche::checkpoint {
namespace {

using namespace tranche::testing;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

/// Refuses each call of `function` once while `make` runs; returns how many there are. Every failure must
/// tell `what` HDF5 was asked for, and the library's own reason, which begins with `reason`.
template <typename Make>
int refuse_each(const std::string& function, const std::string& what, const std::string& reason,
                Make&& make) {
  for (int call = 1;; ++call) {
    const FailingHdf5 failing(function, call);
    const std::string told = message_of<CheckpointError>(make);
    if (!failing.refused()) {
      EXPECT_EQ(told, test::nothing_thrown);
      return call - 1;
    }
    EXPECT_THAT(told, AllOf(StartsWith("HDF5 cannot "), HasSubstr(what), HasSubstr(": " + reason)))
        << function << ", call " << call;
  }
}

TEST(Hdf5Failures, EveryCallThatCanFailWhileTheMasterFileIsMadeIsTold) {
  const Layout layout = sample_layout(2);
  const std::size_t bytes = make_master_image(layout).bytes.size();
  const auto make = [&] { (void)make_master_image(layout); };
  EXPECT_GT(refuse_each("H5Dcreate2", " in model.h5", "invalid ", make), 10);
  EXPECT_GT(refuse_each("H5Pset_virtual", " in model.h5", "not a property list", make), 20);
  EXPECT_GT(refuse_each("H5Lcreate_soft", " in model.h5", "invalid ", make), 0);
  // HDF5 writes the time of day into some objects, so that two images may differ in a few bytes.
  EXPECT_EQ(make_master_image(layout).bytes.size(), bytes) << "the next one is made as if nothing had failed";
}

TEST(Hdf5Failures, EveryDatasetOfAShardThatCannotBeMadeIsTold) {
  const Layout layout = sample_layout(2);
  const auto make = [&] { (void)make_shard_image(layout, 1, 7); };
  EXPECT_GT(refuse_each("H5Dcreate2", "dataset", "invalid ", make), 3);
}

}  // namespace
}  // namespace tranche::checkpoint
