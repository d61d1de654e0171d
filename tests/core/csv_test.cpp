#include "core/csv.h"

#include <gtest/gtest.h>

namespace tranche {
namespace {

using detail::csv_field;

TEST(CsvField, IsQuotedWhereItMustBe) {
  EXPECT_EQ(csv_field(""), "");
  EXPECT_EQ(csv_field("h.3 attn"), "h.3 attn");
  EXPECT_EQ(csv_field("a,b"), R"("a,b")");
  EXPECT_EQ(csv_field(R"(say "hi")"), R"("say ""hi""")");
  EXPECT_EQ(csv_field("two\nlines"), "\"two\nlines\"");
  EXPECT_EQ(csv_field("line\r"), "\"line\r\"");
}

}  // namespace
}  // namespace tranche
