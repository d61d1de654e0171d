// State of a user's program: its own initial weights, arrays in a checkpoint, and memory of another library's
// allocator.
#include <tranche/tranche.h>

#include <unistd.h>

#include <filesystem>
#include <numeric>
#include <string>
#include <vector>

using namespace tranche;

bool brings_its_own_state() {
  Runtime runtime = Runtime::from_config(R"({"train_batch_size": 1, "bf16": {"enabled": false},
      "gradient_clipping": 1.0, "tranche": {"device_memory": "256MiB", "threads": 1}})");
  ModelSpec model;
  model.add_unit(
      {"unit", {{"weight", {1000}, Initializer::from("ramp", [](std::int64_t first, std::span<float> values) {
                   std::iota(values.begin(), values.end(), static_cast<float>(first));
                 })}}});
  Engine engine(runtime, model, runtime.config());
  bool good = engine.read_weight("weight")[999] == 999;

  const std::string folder =
      (std::filesystem::temp_directory_path() / ("tranche_consumer_state." + std::to_string(::getpid())))
          .string();
  std::filesystem::remove_all(folder);
  std::vector<double> average(100, 0.5), given_back(50);
  std::vector<std::int64_t> generator{1, 2, 3}, generator_back(3);
  engine.save(folder,
              {.wait = true,
               .arrays = {SavedArray::part("average", {100}, 0, {average.data(), DataType::float64, {100}}),
                          SavedArray::of_rank("generator", {generator.data(), DataType::int64, {3}})}});
  const LoadResult loaded = engine.load(folder);
  engine.load_arrays(loaded.folder, {{"average", {given_back.data(), DataType::float64, {50}}, 50},
                                     {"generator", {generator_back.data(), DataType::int64, {3}}}});
  good = good && loaded.arrays.size() == 2 && given_back == std::vector<double>(50, 0.5) &&
         generator_back == generator;
  std::filesystem::remove_all(folder);

  const std::int64_t before = runtime.ledger().total(Tier::host);
  void* block = runtime.memory(Tier::host).allocate({1 << 20, Category::activations, "another library"});
  good = good && runtime.ledger().total(Tier::host) == before + (1 << 20);
  runtime.memory(Tier::host).free(block);
  return good && runtime.ledger().total(Tier::host) == before;
}
