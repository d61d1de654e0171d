// Sweeps of meshes with the axis `tensor`: checkpoints between any two meshes, and failures of a rank during
// a layer's messages.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/core/rounds.h"
#include "tests/core/sweep.h"
#include "tests/offload/disk_reads.h"
#include "tiny_llama.h"
#include "training_fixture.h"
#include "tranche/core/error.h"
#include "tranche/models/llama.h"

namespace tranche::models {
namespace {

using testing::HasSubstr;

constexpr std::int64_t short_time = 7;

/// A GPT with a fused projection and a tied table, or a Llama with fewer heads of keys and values than some
/// meshes have ranks. No number of ranks divides vocabulary and inner width.
std::shared_ptr<const LanguageModel> cut_language_model(bool llama) {
  if (llama) {
    LlamaConfig model = tiny_llama(LlamaKind::llama);
    model.heads = 8;
    model.key_value_heads = 2;
    return std::make_shared<Llama>(model);
  }
  GptConfig model = tiny_gpt();
  model.heads = 4;
  model.inner = 50;
  model.vocabulary = 257;
  model.embedding_dropout = model.residual_dropout = 0.1f;
  return std::make_shared<Gpt>(model);
}

struct DrawnMesh {
  std::string text;
  int ranks = 1;
};

/// A mesh of at most eight ranks with its axes in any order. `cut`: the axis tensor has more than one rank.
DrawnMesh draw_mesh(const std::function<std::size_t(std::size_t)>& pick, bool cut, int most_parts) {
  const std::vector<int> parts = most_parts == 8 ? std::vector{2, 4, 8} : std::vector{2, 4};
  int tensor = 1, stages = 1, shards = 1, replicas = 1;
  do {
    tensor = cut || pick(3) == 0 ? parts[pick(parts.size())] : 1;
    stages = 1 + static_cast<int>(pick(2));
    shards = 1 + static_cast<int>(pick(3));
    replicas = 1 + static_cast<int>(pick(2));
  } while (tensor * stages * shards * replicas > 8);
  std::vector<std::string> axes{"tensor=" + std::to_string(tensor)};
  const auto insert = [&](const char* name, int size) {
    axes.insert(axes.begin() + static_cast<std::ptrdiff_t>(pick(axes.size() + 1)),
                name + std::to_string(size));
  };
  insert("shard=", shards);
  insert("pipeline=", stages);
  insert("replicate=", replicas);
  return {axes[0] + ", " + axes[1] + ", " + axes[2] + ", " + axes[3], tensor * stages * shards * replicas};
}

/// At most eight ranks on any of the five axes.
DrawnMesh draw_any_mesh(const std::function<std::size_t(std::size_t)>& pick, int most_parts) {
  DrawnMesh mesh;
  int context = 1;
  do {
    context = 1 + static_cast<int>(pick(3));
    mesh = draw_mesh(pick, false, most_parts);
  } while (mesh.ranks * context > 8);
  const std::string axis = "context=" + std::to_string(context);
  return {pick(2) == 0 ? axis + ", " + mesh.text : mesh.text + ", " + axis, mesh.ranks * context};
}

/// A checkpoint that is saved on one mesh and loaded on another; at least one has the axis tensor.
struct CheckpointPair {
  bool llama = false;
  Config config;
  DrawnMesh from, to;
  int stage_of_reader = 0;
};

/// The first 40 pairs have no axis context, of which one has the axis tensor. The others have any axes.
constexpr std::uint64_t pairs_without_context = 40;

CheckpointPair draw_checkpoint_pair(std::uint64_t number) {
  const RandomKey key{97, RandomPurpose::test, 11};
  std::uint64_t counter = number * 64;
  const auto pick = [&](std::size_t n) -> std::size_t { return random_bits(key, counter++) % n; };
  CheckpointPair pair;
  pair.llama = pick(2) == 0;
  const bool cut_writer = pick(2) == 0;
  const int most_parts = pair.llama ? 8 : 4;
  const bool any = number >= pairs_without_context;
  pair.from = any ? draw_any_mesh(pick, most_parts) : draw_mesh(pick, cut_writer, most_parts);
  pair.to = any ? draw_any_mesh(pick, most_parts) : draw_mesh(pick, !cut_writer, most_parts);
  Config& config = pair.config;
  config = plain_config(1);
  config.train_batch_size = 0;
  config.micro_batch_size = 1;
  config.accumulation_steps = 2;
  config.stage = static_cast<int>(pick(4));
  pair.stage_of_reader = static_cast<int>(pick(4));
  config.precision.compute = config.precision.communication =
      pick(2) == 0 ? DataType::float32 : DataType::bfloat16;
  config.optimizer.type = pick(3) == 0 ? "Lamb" : "AdamW";
  if (pick(3) == 0) config.offload.optimizer = OffloadTier::cpu;
  const std::size_t trained = pick(4);
  if (trained == 0) config.frozen = {pair.llama ? "*k_proj*" : "*c_attn*"};
  if (trained == 1) {
    config.lora = {.rank = 3, .alpha = 6, .save_base = pick(3) == 0};
    const std::size_t targets = pick(3);
    if (targets == 1) config.lora.targets = {"lm_head"};
    if (targets == 2) config.lora.targets = {pair.llama ? "down_proj" : "c_proj"};
  }
  return pair;
}

void train_one_step(Engine& engine, const LanguageModel& model) {
  std::vector<TokenData> places(static_cast<std::size_t>(engine.config().accumulation_steps),
                                TokenData(short_time, model.shape().vocabulary, true));
  const Mesh& mesh = engine.runtime().mesh();
  train_step(model, engine, [&](std::int64_t m) {
    TokenData& data = places[static_cast<std::size_t>(m)];
    const std::int64_t count = engine.config().micro_batch_size;
    data.draw((m * mesh.data_ranks() + mesh.data_rank(engine.runtime().rank())) * count, count);
    return data.batch();
  });
  (void)engine.step();
}

std::int64_t bytes_of_files(const std::string& folder) {
  std::int64_t bytes = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    bytes += static_cast<std::int64_t>(entry.file_size());
  }
  return bytes;
}

/// The values of the axes that these pairs have.
test::AxesMet axes_of_pairs(const test::Sweep& cases) {
  test::AxesMet axes;
  for (std::uint64_t number = cases.first; number < cases.end(); ++number) {
    const CheckpointPair pair = draw_checkpoint_pair(number);
    for (const auto& [whose, drawn, stage] : {std::tuple("writer's ", pair.from, pair.config.stage),
                                              std::tuple("reader's ", pair.to, pair.stage_of_reader)}) {
      const Mesh mesh = Mesh::parse(drawn.text, drawn.ranks);
      for (const MeshAxis axis :
           {MeshAxis::replicate, MeshAxis::pipeline, MeshAxis::shard, MeshAxis::context, MeshAxis::tensor}) {
        axes.meet(std::string(whose) + std::string(name_of(axis)), mesh.size(axis));
      }
      axes.meet(std::string(whose) + "ZeRO", stage);
    }
    axes.meet("llama", pair.llama);
  }
  for (const std::string whose : {"writer's ", "reader's "}) {
    axes.expect(whose + "pipeline", {1, 2});
    axes.expect(whose + "replicate", {1, 2});
    axes.expect(whose + "shard", {1, 2, 3});
    axes.expect(whose + "ZeRO", {0, 1, 2, 3});
  }
  axes.expect("llama", {false, true});
  return axes;
}

void expect_equal_digests(const test::Sweep& cases) {
  for (const std::uint64_t number : test::rounds(cases)) {
    const CheckpointPair pair = draw_checkpoint_pair(number);
    const std::shared_ptr<const LanguageModel> model = cut_language_model(pair.llama);
    const std::filesystem::path folder =
        std::filesystem::temp_directory_path() /
        ("tranche-tensor-" + std::to_string(::getpid()) + "-" + std::to_string(number));
    const std::string line = "draw " + std::to_string(number) + ": from " + pair.from.text + " to " +
                             pair.to.text + ", " + model->architecture() + ", " + pair.config.to_json();
    std::pair<kernels::Digest, kernels::Digest> saved;
    std::string path;
    std::mutex mutex;
    Config config = pair.config;
    config.mesh = pair.from.text;
    on_ranks(pair.from.ranks, model->spec(short_time), config, [&](Engine& engine) {
      train_one_step(engine, *model);
      const std::string written = engine.save(folder.string(), {});
      const std::pair digests(engine.state_digest(), engine.weights_digest());
      const std::lock_guard lock(mutex);
      saved = digests;
      path = written;
    });
    config.mesh = pair.to.text;
    config.stage = pair.stage_of_reader;
    on_ranks(pair.to.ranks, model->spec(short_time), config, [&](Engine& engine) {
      EXPECT_FALSE(engine.state_digest() == saved.first) << line;
      const LoadResult loaded = engine.load(path, {});
      EXPECT_LE(loaded.bytes_read, bytes_of_files(path)) << "no piece of a file is read twice: " << line;
      EXPECT_TRUE(engine.state_digest() == saved.first) << line;
      EXPECT_TRUE(engine.weights_digest() == saved.second) << line;
    });
    std::filesystem::remove_all(folder);
  }
}

TEST(TensorMeshes, CheckpointsOfAnyMeshAreReadByAnyOther) {
  const test::Sweep cases = test::sweep({0, pairs_without_context});
  const test::AxesMet axes = axes_of_pairs(cases);
  for (const std::string whose : {"writer's ", "reader's "}) axes.expect(whose + "tensor", {1, 2, 4, 8});
  expect_equal_digests(cases);
}

TEST(TensorMeshes, CheckpointsOfAnyAxesAreReadByAnyOther) {
  expect_equal_digests(test::sweep({pairs_without_context, 3}));
}
TEST(TensorMeshesSlow, SixtyCheckpointsOfAnyAxesAreReadByAnyOther) {
  const test::Sweep cases = test::sweep({pairs_without_context, 60});
  const test::AxesMet axes = axes_of_pairs(cases);
  for (const std::string whose : {"writer's ", "reader's "}) {
    axes.expect(whose + "tensor", {1, 2, 4});
    axes.expect(whose + "context", {1, 2, 3});
  }
  expect_equal_digests(cases);
}

/// The numbers of elements in tensors that the axis tensor does not cut by columns, and in those that it
/// does.
std::pair<double, double> elements_by_cut(const ModelSpec& spec) {
  std::pair<double, double> elements;
  for (const UnitSpec& unit : spec.units()) {
    for (const TensorSpec& tensor : unit.tensors) {
      bool columns = false;
      for (std::size_t d = 1; d < tensor.dimensions.size(); ++d) {
        const auto& names = spec.tensor_dimensions;
        columns = columns || std::find(names.begin(), names.end(), tensor.dimensions[d].name) != names.end();
      }
      (columns ? elements.second : elements.first) += static_cast<double>(tensor.shape.elements());
    }
  }
  return elements;
}

/// The number of times that a part of the columns is read if `to` ranks read `from` parts.
double readers_of_a_part(int from, int to) {
  int overlaps = 0;
  for (int a = 0; a < from; ++a) {
    for (int b = 0; b < to; ++b)
      overlaps += std::max(a * to, b * from) < std::min((a + 1) * to, (b + 1) * from);
  }
  return static_cast<double>(overlaps) / from;
}

// A vocabulary of 50,257 on up to four ranks; a checkpoint has 250 MB.
TEST(TensorMeshesSlow, LittleMoreIsReadThanIsNeeded) {
  GptConfig config_of_model = tiny_gpt();
  config_of_model.layers = 2;
  config_of_model.heads = 12;
  config_of_model.width = 384;
  config_of_model.vocabulary = 50257;
  const Gpt model(config_of_model);
  const ModelSpec spec = model.spec(short_time);
  const auto [rows, columns] = elements_by_cut(spec);
  EXPECT_GT(columns, 0);
  Config config = plain_config(1);
  config.train_batch_size = 0;
  config.micro_batch_size = 1;
  config.stage = 1;  // each element of the optimizer state belongs to one rank
  // The folder of the build is on a disk, where the temporary folder may not be.
  const std::filesystem::path folder = std::filesystem::read_symlink("/proc/self/exe").parent_path() / "tmp" /
                                       ("tensor-bytes-" + std::to_string(::getpid()));
  const std::vector<std::pair<std::string, int>> meshes{
      {"", 1}, {"tensor=2", 2}, {"shard=2, tensor=2", 4}, {"tensor=4", 4}, {"tensor=3", 3}, {"shard=3", 3}};
  const auto parts = [](const std::pair<std::string, int>& mesh) {
    return Mesh::parse(mesh.first, mesh.second).size(MeshAxis::tensor);
  };
  for (const auto& from : meshes) {
    std::string path;
    config.mesh = from.first;
    on_ranks(from.second, spec, config, [&](Engine& engine) {
      const std::string written = engine.save(folder.string(), {});
      if (engine.runtime().rank() == 0) path = written;
    });
    for (const auto& to : meshes) {
      std::atomic<std::int64_t> read = 0;
      config.mesh = to.first;
      test::drop_from_page_cache(path);
      const std::int64_t before = test::bytes_from_disk();
      on_ranks(to.second, spec, config, [&](Engine& engine) { read += engine.load(path, {}).bytes_read; });
      const auto from_disk = static_cast<double>(test::bytes_from_disk() - before);
      // Weight and two moments in fp32. A leaf of 16 KiB is read whole for verification, and contains columns
      // of every rank. The ranks share a page cache, so the disk reads it once.
      const double needed = 12 * (rows + columns);
      const double leaves = 12 * (rows + columns * readers_of_a_part(parts(from), parts(to)));
      std::printf(
          "measured: '%s' to '%s': %.4f of the needed bytes, %.4f of their leaves, %.4f from the disk\n",
          from.first.c_str(), to.first.c_str(), static_cast<double>(read) / needed,
          static_cast<double>(read) / leaves, from_disk / needed);
      EXPECT_LE(static_cast<double>(read), 1.02 * leaves) << from.first << " to " << to.first;
      EXPECT_GE(static_cast<double>(read), needed);
      EXPECT_LE(from_disk, 1.02 * needed) << from.first << " to " << to.first;
      if (from_disk < needed) {
        std::filesystem::remove_all(folder);
        GTEST_SKIP() << folder << " is on no disk whose reads /proc/self/io counts";
      }
    }
    std::filesystem::remove_all(folder);
  }
}

/// The lines that the ranks of "shard=2, tensor=2" log, by rank, if one of them fails before it begins
/// micro-batch 1, while its neighbour waits for its rows. `failing` receives a function that waits until all
/// other ranks have ended.
std::vector<std::string> texts_of_a_failure(
    int failing_rank, double timeout, const std::function<void(const std::function<void()>&)>& failing) {
  constexpr int ranks = 4;
  const std::shared_ptr<const LanguageModel> model = cut_language_model(false);
  Config config = plain_config(1);
  config.train_batch_size = 0;
  config.micro_batch_size = 1;
  config.accumulation_steps = 3;
  config.mesh = "shard=2, tensor=2";
  config.communication_timeout = timeout;
  std::atomic<int> ended = 0;
  testing::internal::CaptureStderr();
  on_ranks(ranks, model->spec(short_time), config, [&](Engine& engine) {
    const int rank = engine.runtime().rank();
    TokenData data(short_time, model->shape().vocabulary, true);
    try {
      train_step(*model, engine, [&](std::int64_t m) {
        if (rank == failing_rank && m == 1) {
          failing([&] {
            while (ended < ranks - 1) std::this_thread::sleep_for(std::chrono::milliseconds(5));
          });
        }
        data.draw(2 * m + engine.runtime().mesh().data_rank(rank), 1);
        return data.batch();
      });
      (void)engine.step();
      ADD_FAILURE() << "rank " << rank << " did not end";
    } catch (...) {
      (void)engine.fail(std::current_exception());
    }
    ++ended;
  });
  std::istringstream logged(testing::internal::GetCapturedStderr());
  std::vector<std::string> texts(ranks);
  for (std::string line; std::getline(logged, line);) {
    for (int rank = 0; rank < ranks; ++rank) {
      if (line.find("[rank " + std::to_string(rank) + "]") != std::string::npos) {
        texts[static_cast<std::size_t>(rank)] += line + "\n";
      }
    }
  }
  return texts;
}

std::string name_of_rank(int rank) {
  return "rank " + std::to_string(rank) + " (shard " + std::to_string(rank / 2) + ", tensor " +
         std::to_string(rank % 2) + ")";
}

TEST(TensorMeshes, ARankThatThrowsIsNamedWithItsCoordinates) {
  for (const int failing : {0, 3}) {
    const std::vector<std::string> texts =
        texts_of_a_failure(failing, 60, [](const auto&) { throw std::runtime_error("the disk is full"); });
    for (int rank = 0; rank < 4; ++rank) {
      const std::string& text = texts[static_cast<std::size_t>(rank)];
      EXPECT_THAT(text, HasSubstr("the disk is full")) << rank;
      if (rank == failing) continue;
      EXPECT_THAT(text, HasSubstr(name_of_rank(failing) + " failed: ")) << rank;
    }
  }
}

TEST(TensorMeshes, ARankThatHangsIsNamedWithLayerAndMicroBatch) {
  constexpr int seconds = test::sanitized ? 10 : 4;
  for (const int hanging : {1, 2}) {
    const auto begin = std::chrono::steady_clock::now();
    const std::vector<std::string> texts =
        texts_of_a_failure(hanging, seconds, [](const auto& until_others_end) { until_others_end(); });
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(60));
    const std::string& neighbour = texts[static_cast<std::size_t>(hanging ^ 1)];
    EXPECT_THAT(neighbour, HasSubstr(name_of_rank(hanging)));
    EXPECT_THAT(neighbour, HasSubstr("rows of embedding"));
    EXPECT_THAT(neighbour, HasSubstr("micro-batch 1"));
    for (int rank = 0; rank < 4; ++rank) {
      if (rank == hanging) continue;
      EXPECT_THAT(texts[static_cast<std::size_t>(rank)], HasSubstr(name_of_rank(hanging))) << rank;
    }
  }
}

}  // namespace
}  // namespace tranche::models
