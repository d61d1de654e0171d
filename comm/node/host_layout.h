#pragma once
/// Which members of a group share a host, and who exchanges what with whom across hosts. Arithmetic only.

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace tranche::comm {

/// Members of a group by host, both in group order.
class HostLayout {
 public:
  HostLayout() = default;
  /// `hosts`: by member; equal numbers share a host.
  explicit HostLayout(const std::vector<int>& hosts);
  int hosts() const { return static_cast<int>(members_.size()); }
  int ranks() const { return static_cast<int>(host_.size()); }
  const std::vector<int>& members(int host) const { return members_[static_cast<std::size_t>(host)]; }
  int host(int member) const { return host_[static_cast<std::size_t>(member)]; }
  /// Index among the members of its host.
  int local(int member) const { return local_[static_cast<std::size_t>(member)]; }
  /// The member of `host` that stands for it towards `member`, which is on another.
  int counterpart(int member, int host) const;
  /// How many members of other hosts `member` stands for its host towards.
  std::int64_t count_towards(int member) const;
  /// Those members.
  std::vector<int> stands_towards(int member) const;

 private:
  std::vector<std::vector<int>> members_;
  std::vector<int> host_, local_;
  std::map<int, std::int64_t> sizes_;  ///< hosts, by their ranks
};

/// The data that crosses between nodes in a deterministic sum with groups of `group_size` consecutive
/// members. A group that lies on one host sends one fp32 sum of it; members of a group that lies on several
/// send what they have, since their sum depends on its order. Either way every addition of the bracket is one
/// piece sent or read, so that N-1 pieces per shard travel whatever the layout.
class ReducePlan {
 public:
  ReducePlan(const HostLayout& layout, int group_size, std::int64_t width);
  int groups() const { return static_cast<int>(host_of_group_.size()); }
  int group_of(int member) const { return member / group_size_; }
  /// First and last but one member.
  std::pair<int, int> range(int group) const;
  /// The host whose members sum a group for the others; -1 when they do not.
  int host_of_group(int group) const { return host_of_group_[static_cast<std::size_t>(group)]; }
  /// Groups that a host sums for the others, in order.
  const std::vector<int>& sums(int host) const { return sums_[static_cast<std::size_t>(host)]; }
  /// Members of a host that send what they have, in order.
  const std::vector<int>& raw(int host) const { return raw_[static_cast<std::size_t>(host)]; }
  /// Bytes of a slot per element of the chunk: pieces that are copied in, sums sent, and what arrives; of the
  /// member that needs most.
  std::int64_t slot_width() const { return slot_width_; }
  std::int64_t largest_message_width() const { return largest_message_width_; }
  /// fp32 sums, each as long as a shard, that a member sends.
  std::int64_t sums_sent(const HostLayout& layout, int member) const;

 private:
  int group_size_, ranks_;
  std::vector<int> host_of_group_;
  std::vector<std::vector<int>> sums_, raw_;
  std::int64_t slot_width_ = 0, largest_message_width_ = 4;
};

}  // namespace tranche::comm
