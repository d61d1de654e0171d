#pragma once
/// The cuts that divide a model's units among the stages of a pipeline. Integers and counted operations only.

#include <functional>
#include <span>
#include <string_view>
#include <vector>

namespace tranche::detail {

/// For each stage the first of the uses of units that it computes, in forward order; stage s has uses
/// [cuts[s], cuts[s + 1]), and the last stage all from cuts.back() on. `work` is the operations of each use.
/// The largest share of a stage is the least that there is; of the cuts with this share, stages take as many
/// uses from the front as fit. Throws InvalidArgument when there are more stages than uses.
std::vector<int> balanced_cuts(std::span<const double> work, int stages);
/// The same with `share(begin, end)` as the work of uses [begin, end), for work that uses have in common. It
/// never falls as a range grows.
std::vector<int> balanced_cuts(int uses, int stages, const std::function<double(int, int)>& share);
/// Equal numbers of uses for each stage; the first stages get one more if the uses do not divide.
std::vector<int> equal_cuts(int uses, int stages);
/// The cuts that `begins` lists, the first use of each stage but the first. Throws InvalidArgument naming the
/// list and its first wrong number when it has another length than stages - 1, does not ascend, or leaves a
/// stage without a use. `part` is what it calls a stage: a model may be cut into chunks.
std::vector<int> listed_cuts(std::span<const int> begins, int uses, int stages,
                             std::string_view part = "stage");

}  // namespace tranche::detail
