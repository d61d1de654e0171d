#include "device/memory_advice.h"

#include <gmock/gmock.h>

#include <limits>

#include "tests/core/error_text.h"
#include "tranche/core/error.h"
#include "tranche/device/memory_resources.h"

namespace tranche {
namespace {

using detail::memory_advice;
using test::message_of;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

TEST(MemoryAdvice, BeginsWithWhatDecidesTheSize) {
  EXPECT_THAT(memory_advice(Tier::device, Category::workspace),
              StartsWith("use a smaller tranche.workspace,"));
  EXPECT_THAT(memory_advice(Tier::device, Category::communication),
              StartsWith("use a smaller tranche.communication_slab,"));
  EXPECT_THAT(memory_advice(Tier::device, Category::gathered), StartsWith("use a smaller tranche.depth,"));
  EXPECT_THAT(memory_advice(Tier::device, Category::activations),
              StartsWith("use a smaller micro-batch, tranche.activation_checkpointing,"));
  for (const Category state : {Category::parameters, Category::gradients, Category::optimizer}) {
    EXPECT_THAT(memory_advice(Tier::device, state), StartsWith("use a higher stage, more ranks"));
    EXPECT_THAT(memory_advice(Tier::host, state), HasSubstr("offload to nvme"));
  }
  EXPECT_THAT(memory_advice(Tier::host, Category::communication), HasSubstr("tranche.communication_slab"));
  EXPECT_THAT(memory_advice(Tier::host, Category::activations), HasSubstr("cpu_checkpointing"));
  for (const Category category : all_categories) {
    EXPECT_THAT(memory_advice(Tier::host, category),
                AllOf(StartsWith("use "), Not(HasSubstr("higher stage"))))
        << "which takes from the device";
    EXPECT_THAT(memory_advice(Tier::device, category), StartsWith("use "));
  }
}

TEST(MemoryAdvice, EndsRefusalsOfABudgetAndOfTheSystem) {
  const auto system = make_host_resource(Tier::device);
  LimitResource limited(*system, 1024, nullptr);
  EXPECT_THAT(
      message_of<OutOfMemory>([&] {
        limited.allocate({2048, Category::workspace, "workspace"});
      }),
      AllOf(HasSubstr("are left; use a smaller tranche.workspace, a higher stage or more ranks, or raise "
                      "the limit"),
            Not(HasSubstr("micro-batch"))));
  EXPECT_THAT(message_of<OutOfMemory>([&] {
                system->allocate({std::numeric_limits<std::int64_t>::max(), Category::gathered, "h.1"});
              }),
              HasSubstr("; use a smaller tranche.depth"));
}

}  // namespace
}  // namespace tranche
