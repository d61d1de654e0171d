// Plans the memory of GPT-2 a rank: every ZeRO stage without a device, MPI or the memory itself, and looks
// for the cheapest configuration that fits a budget: plan_memory [MODEL] [RANKS] [GiB]
#include <tranche/planner/planner.h>

#include <cstdio>
#include <string>
using namespace tranche;

int main(int argc, char** argv) {
  const double gib = 1024.0 * 1024.0 * 1024.0;
  planner::PlanRequest request;
  request.model = planner::load_plan_model(argc > 1 ? argv[1] : "gpt2");
  request.ranks = argc > 2 ? std::stoi(argv[2]) : 8;
  request.sequence = 128;
  for (int stage = 0; stage <= 3; ++stage) {
    request.config.stage = stage;
    const planner::PlanResult plan = planner::plan_run(request);
    double sent = 0;
    for (const auto& [operation, count] : plan.data) sent += static_cast<double>(count.bytes);
    std::printf("stage %d: at most %.3f GiB a rank, %.3f GiB sent a step\n", stage,
                static_cast<double>(plan.tier(Tier::device).peak) / gib, sent / gib);
  }
  planner::FitRequest search;
  search.plan = request;
  search.budget = static_cast<std::int64_t>((argc > 3 ? std::stod(argv[3]) : 1.0) * gib);
  const planner::FitResult found = planner::find_fit(search);
  std::printf("%s: stage %d\n", found.fits ? "fits" : "nothing fits", found.config.stage);
}
