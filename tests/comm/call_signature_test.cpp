#include "comm/call_record.h"

#include <gtest/gtest.h>

namespace tranche::comm {
namespace {

CallSignature signature(int rank, std::uint64_t number, const char* operation, const char* unit,
                        std::int64_t bytes = 64, int context = 0) {
  return make_call_signature(rank, Tag{context, false, number}, bytes, operation, unit);
}

TEST(CallSignature, TheLowerRankIsNamedFirst) {
  const CallSignature one = signature(3, 17, "all_gather", "a"),
                      other = signature(1, 17, "reduce_scatter", "b");
  const std::string text =
      "rank 1 issued reduce_scatter of unit b (number 17) where rank 3 issued all_gather of unit a (number "
      "17): the "
      "ranks' calls differ";
  EXPECT_EQ(difference(one, other, {}), text);
  EXPECT_EQ(difference(other, one, {}), text);
}

TEST(CallSignature, BytesAreNamedWhereNothingElseDiffers) {
  EXPECT_EQ(difference(signature(0, 2, "barrier", ""), signature(1, 2, "barrier", ""), {}), "");
  EXPECT_EQ(difference(signature(0, 2, "broadcast", "", 8), signature(1, 2, "broadcast", "", 16), {}),
            "rank 0 issued broadcast of 8 bytes (number 2) where rank 1 issued broadcast of 16 bytes (number "
            "2): the "
            "ranks' calls differ");
}

TEST(CallSignature, LongUnitsAreCut) {
  const std::string name(500, 'x');
  EXPECT_EQ(std::string(signature(0, 0, "all_gather", name.c_str()).unit.data()), name.substr(0, 103));
  EXPECT_EQ(difference(signature(0, 0, "all_gather", name.c_str()),
                       signature(1, 0, "all_gather", name.c_str()), {}),
            "");
}

TEST(CallSignature, HashesTellOperationAndUnitApart) {
  EXPECT_EQ(hash_of_call("all_gather", "h.3"), hash_of_call("all_gather", "h.3"));
  EXPECT_NE(hash_of_call("all_gather", "h.3"), hash_of_call("all_gather", "h.4"));
  EXPECT_NE(hash_of_call("all_gather", "h.3"), hash_of_call("reduce_scatter", "h.3"));
}

TEST(CallRecord, FindsCallsByNumberAndCommunicator) {
  CallRecord record;
  EXPECT_TRUE(record.comes(signature(1, 0, "barrier", "")));
  for (std::uint64_t number = 0; number < 3000; ++number) record.add(signature(0, number, "all_gather", "a"));
  record.add(signature(0, 0, "barrier", "", 0, 5));
  EXPECT_FALSE(record.comes(signature(1, 2999, "barrier", "")));
  EXPECT_TRUE(record.comes(signature(1, 3000, "barrier", "")));
  EXPECT_EQ(record.same_number(signature(1, 2999, "barrier", ""))->number, 2999U);
  EXPECT_EQ(record.same_number(signature(1, 2500, "barrier", ""))->number, 2500U);
  EXPECT_FALSE(record.same_number(signature(1, 3000, "barrier", "")));
  EXPECT_FALSE(record.same_number(signature(1, 100, "barrier", ""))) << "too long ago";
  EXPECT_STREQ(record.same_number(signature(1, 0, "x", "", 0, 5))->operation.data(), "barrier");
  EXPECT_FALSE(record.same_number(signature(1, 0, "x", "", 0, 4)));
}

}  // namespace
}  // namespace tranche::comm
