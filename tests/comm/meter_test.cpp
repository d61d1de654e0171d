#include "tranche/comm/meter.h"

#include <gtest/gtest.h>

namespace tranche {
namespace {

TEST(ByteMeter, AddsUpAndResets) {
  ByteMeter meter;
  meter.add("all_gather", Traffic::data, {1, 10, 20, 7, 14});
  meter.add("all_gather", Traffic::data, {1, 1, 2, 1, 2});
  meter.add("barrier", Traffic::control, {1});
  EXPECT_EQ(meter.counts(Traffic::data).at("all_gather").calls, 2);
  EXPECT_EQ(meter.total(Traffic::data).elements, 11);
  EXPECT_EQ(meter.total(Traffic::data).bytes, 22);
  EXPECT_EQ(meter.total(Traffic::data).to_other_nodes, 8);
  EXPECT_EQ(meter.counts(Traffic::data).at("all_gather").node_to_other_nodes, 16);
  EXPECT_EQ(meter.total(Traffic::control).calls, 1);
  meter.reset();
  EXPECT_TRUE(meter.counts(Traffic::data).empty());
}

}  // namespace
}  // namespace tranche
