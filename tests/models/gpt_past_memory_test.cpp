// GPTs larger than the device's memory: state on NVMe, saved activations in host memory, equal bits.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "memory_draw.h"

namespace tranche::models {
namespace {

using ::testing::HasSubstr;

MemoryCase deep_case(std::int64_t layers) {
  MemoryCase one;
  one.model.layers = layers;
  one.model.width = 192;
  one.model.heads = 3;
  one.model.vocabulary = 256;
  one.model.positions = 16;
  one.sequence = 16;
  Config& config = one.config;
  config.micro_batch_size = 1;
  config.accumulation_steps = 1;
  config.stage = 3;
  config.activation_checkpointing = true;
  config.workspace_bytes = kernels::minimum_workspace_bytes;
  config.threads = 1;
  config.offload.optimizer = OffloadTier::nvme;
  config.offload.parameters = OffloadTier::nvme;
  config.offload.activations = true;
  config.offload.nvme_path = std::filesystem::temp_directory_path().string();
  return one;
}

std::int64_t parameters_of(const MemoryCase& one) {
  return Gpt::spec(one.model, one.sequence).parameters();
}

TEST(GptPastMemory, TrainsAtAnEighthOfItsStatesToTheSameBits) {
  MemoryCase deep = deep_case(24);
  const std::int64_t budget = plan_case(deep).device().peak;
  EXPECT_GE(16 * parameters_of(deep), 8 * budget)
      << "states of " << 16 * parameters_of(deep) << " B on a device of " << budget << " B";
  const auto digest_of = [](const MemoryCase& one) {
    kernels::Digest digest;
    on_ranks(1, Gpt::spec(one.model, one.sequence), one.config, [&](Engine& engine) {
      run_case(one, engine, 3, 0);
      digest = engine.state_digest();
    });
    return digest;
  };
  deep.config.device_memory_limit = budget;
  const kernels::Digest offloaded = digest_of(deep);
  deep.config.offload = {};
  try {
    (void)digest_of(deep);
    FAIL() << "the states fit after all";
  } catch (const OutOfMemory& error) {
    EXPECT_THAT(error.message(), HasSubstr("device"));
  }
  deep.config.device_memory_limit = 0;
  EXPECT_EQ(digest_of(deep), offloaded);
}

TEST(GptPastMemory, TheDevicesPeakDoesNotGrowWithTheNumberOfBlocks) {
  const MemoryCase few = deep_case(8), many = deep_case(40);
  const std::int64_t block_bytes = 2 * (parameters_of(many) - parameters_of(few)) / 32;
  const std::int64_t grown = plan_case(many).device().peak - plan_case(few).device().peak;
  EXPECT_LE(grown, 32 * block_bytes / 100) << grown << " B for 32 blocks of " << block_bytes << " B";
  // The measured bytes equal the planned ones, in every tier.
  MemoryCase one = deep_case(8);
  const MemoryRun planned = plan_case(one), measured = measure_case(one)[0];
  for (std::size_t tier = 0; tier < tier_count; ++tier) {
    EXPECT_EQ(planned.tiers[tier].peak, measured.tiers[tier].peak) << tier;
    EXPECT_EQ(planned.tiers[tier].category_peak.bytes, measured.tiers[tier].category_peak.bytes) << tier;
  }
}

}  // namespace
}  // namespace tranche::models
