"""Finds names of the standard library that a header uses without including their declaration.

check.py compiles our headers after those of the standard library, so the compiler does not notice a missing include. This script does, and
it is stricter than the compiler: it requires the header that the standard names, rather than one that happens to include it here.
"""
import re

# The names that each header declares. If a name is in several headers, each of them is accepted. A name that is not in the table is an
# error, so that none is left unchecked: add it here. The first part of a nested name counts (chrono::seconds).
TABLE = {
    "algorithm": """adjacent_find all_of any_of binary_search clamp copy copy_backward copy_if copy_n count count_if equal equal_range
        fill fill_n find find_end find_first_of find_if find_if_not for_each for_each_n generate generate_n includes inplace_merge
        is_heap is_partitioned is_permutation is_sorted is_sorted_until iter_swap lexicographical_compare lower_bound make_heap max
        max_element merge min min_element minmax minmax_element mismatch move move_backward next_permutation none_of nth_element
        partial_sort partition partition_copy partition_point pop_heap prev_permutation push_heap ranges remove remove_copy remove_if
        replace replace_copy replace_if reverse reverse_copy rotate rotate_copy search search_n set_difference set_intersection
        set_symmetric_difference set_union shuffle sort sort_heap stable_partition stable_sort swap_ranges transform unique unique_copy
        upper_bound""",
    "any": "any any_cast bad_any_cast make_any",
    "array": "array begin data empty end get size to_array tuple_element tuple_size",
    "atomic": """atomic atomic_bool atomic_flag atomic_int atomic_ref atomic_signal_fence atomic_thread_fence memory_order
        memory_order_acq_rel memory_order_acquire memory_order_relaxed memory_order_release memory_order_seq_cst""",
    "barrier": "barrier",
    "bit": "bit_cast bit_ceil bit_floor bit_width countl_one countl_zero countr_one countr_zero endian has_single_bit popcount rotl rotr",
    "bitset": "bitset hash",
    "cassert": "assert",
    "cerrno": "errno EAGAIN EEXIST EINTR EINVAL EIO ENOENT ENOMEM ENOSPC",
    "cfenv": "fegetround fesetround feclearexcept fetestexcept",
    "cfloat": "DBL_DIG DBL_EPSILON DBL_MAX DBL_MIN FLT_DIG FLT_EPSILON FLT_MANT_DIG FLT_MAX FLT_MIN FLT_RADIX",
    "charconv": "chars_format from_chars from_chars_result to_chars to_chars_result",
    "chrono": "chrono",
    "cinttypes": "PRId32 PRId64 PRIu32 PRIu64 PRIx64 imaxdiv_t strtoimax strtoumax",
    "climits": "CHAR_BIT INT_MAX INT_MIN LLONG_MAX LLONG_MIN LONG_MAX LONG_MIN UINT_MAX ULLONG_MAX ULONG_MAX",
    "cmath": """INFINITY HUGE_VAL HUGE_VALF NAN abs acos asin atan atan2 cbrt ceil copysign cos cosh erf erfc exp exp2 expm1 fabs fdim
        float_t floor fma fmax fmin fmod fpclassify frexp hypot ilogb isfinite isgreater isinf isnan isnormal ldexp lerp lgamma llrint
        llround log log10 log1p log2 logb lrint lround modf nan nearbyint nextafter pow remainder remquo rint round scalbn signbit sin
        sinh sqrt tan tanh tgamma trunc""",
    "codecvt": "",
    "compare": """common_comparison_category compare_three_way is_eq is_gt is_gteq is_lt is_lteq is_neq partial_order partial_ordering
        strong_order strong_ordering weak_order weak_ordering""",
    "complex": "complex conj imag norm polar real",
    "concepts": """assignable_from common_with constructible_from convertible_to copy_constructible copyable default_initializable
        derived_from destructible equality_comparable equality_comparable_with floating_point integral invocable movable
        move_constructible predicate regular regular_invocable same_as semiregular signed_integral swappable totally_ordered
        unsigned_integral""",
    "condition_variable": "condition_variable condition_variable_any cv_status notify_all_at_thread_exit",
    "coroutine": "coroutine_handle coroutine_traits noop_coroutine suspend_always suspend_never",
    "csignal": "SIGABRT SIGINT SIGTERM raise sig_atomic_t signal",
    "cstdarg": "va_arg va_copy va_end va_list va_start",
    "cstddef": "NULL byte max_align_t nullptr_t offsetof ptrdiff_t size_t to_integer",
    "cstdint": """INT16_MAX INT16_MIN INT32_C INT32_MAX INT32_MIN INT64_C INT64_MAX INT64_MIN INT8_MAX INT8_MIN INTMAX_MAX INTPTR_MAX
        PTRDIFF_MAX SIZE_MAX UINT16_MAX UINT32_C UINT32_MAX UINT64_C UINT64_MAX UINT8_MAX UINTPTR_MAX int16_t int32_t int64_t int8_t
        int_fast32_t int_least32_t intmax_t intptr_t uint16_t uint32_t uint64_t uint8_t uint_fast32_t uint_least32_t uintmax_t
        uintptr_t""",
    "cstdio": """BUFSIZ EOF FILE SEEK_CUR SEEK_END SEEK_SET fclose feof ferror fflush fgetc fgets fopen fpos_t fprintf fputc fputs fread
        freopen fscanf fseek ftell fwrite getc getchar perror printf putc putchar puts remove rename rewind scanf setbuf setvbuf size_t
        snprintf sprintf sscanf stderr stdin stdout tmpfile ungetc vfprintf vprintf vsnprintf vsprintf""",
    "cstdlib": """EXIT_FAILURE EXIT_SUCCESS RAND_MAX abort abs aligned_alloc at_quick_exit atexit atof atoi atol atoll bsearch calloc div
        exit free getenv labs llabs malloc mblen qsort quick_exit rand realloc size_t srand strtod strtof strtol strtold strtoll
        strtoul strtoull system""",
    "cstring": """memchr memcmp memcpy memmove memset size_t strcat strchr strcmp strcoll strcpy strcspn strerror strlen strncat strncmp
        strncpy strpbrk strrchr strspn strstr strtok strxfrm""",
    "ctime": "asctime clock clock_t ctime difftime gmtime localtime mktime size_t strftime time time_t timespec timespec_get tm",
    "cwchar": "mbstate_t size_t",
    "deque": "begin data deque empty end erase erase_if size",
    "exception": """bad_exception current_exception exception exception_ptr get_terminate make_exception_ptr nested_exception
        rethrow_exception
        rethrow_if_nested set_terminate terminate terminate_handler throw_with_nested uncaught_exceptions""",
    "execution": "execution",
    "filesystem": "filesystem",
    "forward_list": "begin empty end forward_list",
    "fstream": "basic_fstream basic_ifstream basic_ofstream filebuf fstream ifstream ofstream",
    "functional": """bad_function_call bind bind_front bit_and bit_or bit_xor cref divides equal_to function greater greater_equal hash
        identity invoke is_bind_expression less less_equal logical_and logical_not logical_or mem_fn minus modulus multiplies negate
        not_equal_to not_fn placeholders plus ranges ref reference_wrapper unwrap_ref_decay unwrap_reference""",
    "future": "async future future_error future_status launch packaged_task promise shared_future",
    "initializer_list": "begin end initializer_list",
    "iomanip": "get_time put_time quoted setbase setfill setprecision setw",
    "ios": """basic_ios boolalpha dec defaultfloat fixed fpos hex hexfloat ios ios_base iostream_category left noshowpos oct right
        scientific showbase showpoint showpos streamoff streampos streamsize uppercase""",
    "iosfwd": """basic_istream basic_ostream basic_streambuf fstream ifstream ios iostream istream istringstream ofstream ostream
        ostringstream streambuf streampos stringbuf stringstream""",
    "iostream": "cerr cin clog cout",
    "istream": "basic_iostream basic_istream iostream istream ws",
    "iterator": """advance back_insert_iterator back_inserter begin bidirectional_iterator bidirectional_iterator_tag cbegin cend
        contiguous_iterator contiguous_iterator_tag crbegin crend data default_sentinel distance empty end forward_iterator
        forward_iterator_tag front_inserter incrementable indirectly_readable input_iterator input_iterator_tag input_or_output_iterator
        insert_iterator inserter istream_iterator istreambuf_iterator iter_difference_t iter_reference_t iter_value_t iterator_traits
        make_move_iterator make_reverse_iterator move_iterator next ostream_iterator ostreambuf_iterator output_iterator
        output_iterator_tag prev random_access_iterator random_access_iterator_tag ranges rbegin rend reverse_iterator sentinel_for size
        sized_sentinel_for ssize weakly_incrementable""",
    "latch": "latch",
    "limits": "float_denorm_style float_round_style numeric_limits",
    "list": "begin empty end list size",
    "locale": "isalnum isalpha isdigit islower isspace isupper locale tolower toupper",
    "map": "begin empty end erase_if map multimap size",
    "memory": """addressof align allocate_shared allocator allocator_arg_t allocator_traits assume_aligned bad_weak_ptr
        const_pointer_cast construct_at default_delete destroy destroy_at destroy_n dynamic_pointer_cast enable_shared_from_this hash
        make_shared make_shared_for_overwrite make_unique make_unique_for_overwrite owner_less pointer_traits ranges
        reinterpret_pointer_cast shared_ptr static_pointer_cast to_address uninitialized_copy uninitialized_default_construct
        uninitialized_fill uninitialized_move unique_ptr uses_allocator weak_ptr""",
    "memory_resource": "pmr",
    "mutex": """adopt_lock adopt_lock_t call_once defer_lock defer_lock_t lock lock_guard mutex once_flag recursive_mutex
        recursive_timed_mutex scoped_lock timed_mutex try_lock try_to_lock try_to_lock_t unique_lock""",
    "new": """align_val_t bad_alloc bad_array_new_length destroying_delete_t get_new_handler hardware_constructive_interference_size
        hardware_destructive_interference_size launder new_handler nothrow nothrow_t set_new_handler""",
    "numbers": "numbers",
    "numeric": """accumulate adjacent_difference exclusive_scan gcd inclusive_scan inner_product iota lcm midpoint partial_sum reduce
        transform_exclusive_scan transform_inclusive_scan transform_reduce""",
    "optional": "bad_optional_access hash in_place make_optional nullopt nullopt_t optional swap",
    "ostream": "basic_ostream endl ends flush ostream",
    "queue": "priority_queue queue",
    "random": """bernoulli_distribution default_random_engine discrete_distribution exponential_distribution gamma_distribution
        generate_canonical mersenne_twister_engine minstd_rand mt19937 mt19937_64 normal_distribution poisson_distribution random_device
        seed_seq student_t_distribution uniform_int_distribution uniform_random_bit_generator uniform_real_distribution""",
    "ranges": "begin end ranges views",
    "ratio": "giga kilo mega micro milli nano ratio",
    "regex": "cmatch regex regex_error regex_match regex_replace regex_search smatch sregex_iterator",
    "scoped_allocator": "scoped_allocator_adaptor",
    "semaphore": "binary_semaphore counting_semaphore",
    "set": "begin empty end erase_if multiset set size",
    "shared_mutex": "shared_lock shared_mutex shared_timed_mutex",
    "source_location": "source_location",
    "span": "as_bytes as_writable_bytes begin data dynamic_extent empty end size span",
    "sstream": "basic_stringstream istringstream ostringstream stringbuf stringstream",
    "stack": "stack",
    "stdexcept": """domain_error invalid_argument length_error logic_error out_of_range overflow_error range_error runtime_error
        underflow_error""",
    "stop_token": "stop_callback stop_source stop_token",
    "streambuf": "basic_streambuf streambuf",
    "string": """basic_string begin char_traits data empty end erase erase_if getline hash size stod stof stoi stol stold stoll stoul
        stoull string swap to_string to_wstring u16string u32string u8string wstring""",
    "string_view": "basic_string_view begin data empty end hash size string_view u8string_view wstring_view",
    "syncstream": "osyncstream",
    "system_error": """errc error_category error_code error_condition generic_category hash is_error_code_enum make_error_code
        system_category system_error""",
    "thread": "hash jthread stop_token this_thread thread",
    "tuple": """apply forward_as_tuple get ignore make_from_tuple make_tuple tie tuple tuple_cat tuple_element tuple_element_t tuple_size
        tuple_size_v""",
    "type_traits": """add_const add_const_t add_lvalue_reference_t add_pointer_t aligned_storage aligned_storage_t alignment_of
        bool_constant
        common_type common_type_t conditional conditional_t conjunction conjunction_v decay decay_t disjunction disjunction_v enable_if
        enable_if_t extent_v false_type has_unique_object_representations_v integral_constant invoke_result invoke_result_t
        is_abstract_v is_aggregate_v is_arithmetic is_arithmetic_v is_array_v is_assignable_v is_base_of is_base_of_v is_class_v
        is_const_v is_constant_evaluated is_constructible_v is_convertible is_convertible_v is_copy_assignable_v is_copy_constructible_v
        is_default_constructible_v is_destructible_v is_empty_v is_enum is_enum_v is_final_v is_floating_point is_floating_point_v
        is_function_v is_fundamental_v is_integral is_integral_v is_invocable is_invocable_r_v is_invocable_v is_lvalue_reference_v
        is_move_assignable_v is_move_constructible_v is_nothrow_copy_constructible_v is_nothrow_default_constructible_v
        is_nothrow_destructible_v is_nothrow_invocable_v is_nothrow_move_assignable_v is_nothrow_move_constructible_v is_null_pointer_v
        is_object_v is_pointer is_pointer_v is_polymorphic_v is_reference_v is_rvalue_reference_v is_same is_same_v is_scalar_v
        is_signed_v is_standard_layout_v is_trivial_v is_trivially_copyable is_trivially_copyable_v is_trivially_default_constructible_v
        is_trivially_destructible_v is_unsigned_v is_void is_void_v make_signed_t make_unsigned_t negation negation_v rank_v
        remove_const_t
        remove_cv_t remove_cvref remove_cvref_t remove_extent_t remove_pointer_t remove_reference remove_reference_t true_type
        type_identity type_identity_t underlying_type underlying_type_t void_t""",
    "typeindex": "hash type_index",
    "typeinfo": "bad_cast bad_typeid type_info",
    "unordered_map": "begin empty end erase_if size unordered_map unordered_multimap",
    "unordered_set": "begin empty end erase_if size unordered_multiset unordered_set",
    "utility": """as_const cmp_equal cmp_greater cmp_greater_equal cmp_less cmp_less_equal cmp_not_equal declval exchange forward get
        in_place in_place_index in_place_t in_place_type in_range index_sequence index_sequence_for integer_sequence make_index_sequence
        make_integer_sequence make_pair move move_if_noexcept pair piecewise_construct piecewise_construct_t rel_ops swap tuple_element
        tuple_element_t tuple_size tuple_size_v""",
    "valarray": "valarray",
    "variant": """bad_variant_access get get_if hash holds_alternative in_place_index in_place_type monostate swap variant
        variant_alternative_t variant_size_v visit""",
    "vector": "begin data empty end erase erase_if hash size swap vector",
    "version": "",
}
# Headers that the standard says others include.
INCLUDED = {
    "compare": """array chrono coroutine deque filesystem forward_list iterator list map memory optional queue ranges set stack string
        string_view system_error thread tuple typeindex unordered_map unordered_set utility variant vector""",
    "initializer_list": """algorithm array deque forward_list list map queue random ranges regex set stack string unordered_map
        unordered_set utility valarray vector""",
    "ios": "iostream", "istream": "iostream", "iterator": "ranges", "ostream": "iostream", "streambuf": "iostream", "string": "bitset",
}
# Code that needs a header without naming anything from it.
SYNTAX = [
    (re.compile(r"<=>"), "compare"), (re.compile(r"\btypeid\b"), "typeinfo"), (re.compile(r"\bnew\s*\((?!std::nothrow|std::align)"), "new"),
    (re.compile(r"\bfor\s*\([^;()]*:\s*\{"), "initializer_list"), (re.compile(r"\bco_(?:await|return|yield)\b"), "coroutine"),
]
OF_C = [header for header in TABLE if header[0] == "c" and header[1:] in """assert errno fenv float inttypes limits math signal stdarg
    stddef stdint stdio stdlib string time wchar""".split()]

HOMES = {}  # the headers of each name, the preferred one first
for _header in ["utility", "functional", "iterator", *TABLE]:
    for _name in TABLE[_header].split():
        HOMES.setdefault(_name, []).append(_header)
for _header, _others in INCLUDED.items():
    for _name in TABLE[_header].split():
        HOMES.setdefault(_name, []).extend(_others.split())
OF_C_NAMES = {name for header in OF_C for name in TABLE[header].split()}
# Names of C that are unambiguous wherever they occur: types and macros.
PLAIN = {name for name in OF_C_NAMES if re.search(r"_t$|^[A-Z]", name)} | set("assert errno stderr stdin stdout offsetof va_list".split())
QUALIFIED = re.compile(r"\bstd\s*::\s*(\w+)(\s*[&*])?")
GLOBAL = re.compile(r"(?<![\w>:])\s*::\s*([A-Za-z_]\w*)")
CALL = re.compile(r"(?:(?<=[=({\[,;!&|?:+\-*/<>~])|\breturn\b|^)\s*(?<!::)(?<!->)([A-Za-z_]\w*)\s*\(")
BARE = re.compile(r"(?<![\w.])(?<!->)(?<!::)[A-Za-z_]\w*")
FUNCTION = re.compile(r"[\w>&*]\s+[&*]*(\w+)\(")


def uses(line, macros, ours):
    """Returns (name, headers that declare it) for the names that a line of code uses; no headers for a name without a row. macros: those of
    the standard library's headers; ours: functions that our headers declare."""
    for pattern, header in SYNTAX:
        if pattern.search(line):
            yield pattern.search(line)[0].strip(), [header, *INCLUDED.get(header, "").split()]
    if re.search(r"\busing\s+namespace\s+std\b", line):
        yield "using namespace std", []
    for name, indirect in QUALIFIED.findall(line):
        yield f"std::{name}", [home for home in HOMES.get(name, []) if home != "iosfwd" or indirect]
    for name in GLOBAL.findall(line):
        yield f"::{name}", HOMES[name] if name in OF_C_NAMES else []
    for name in BARE.findall(line):
        if name in PLAIN or name in macros:
            yield name, HOMES.get(name, [])
    for name in CALL.findall(line):
        if name in OF_C_NAMES - PLAIN - ours:
            yield name, HOMES[name]


def of_cpp(header):
    """The C++ name of a C header: cstdint for stdint.h."""
    name = f"c{header[:-2]}"
    return name if header.endswith(".h") and name in OF_C else header


def complaints(tree, macros):
    """A line for each name of the standard library that a header uses without an earlier include of its declaration. macros: those that the
    standard library's headers define."""
    plain = "lead", "plain"

    def included(name):
        return {of_cpp(path) for one in [name, *tree.below(name, plain)] for path in tree.headers[one].included(False, plain)}

    functions = {name: set(FUNCTION.findall("\n".join(header.lines))) for name, header in tree.headers.items()}
    found = []
    for name in tree.checked:
        header, near = tree.headers[name], [name, *tree.below(name)]
        ours = set().union(*(functions[one] for one in near))
        theirs = macros.difference(*(tree.headers[one].macros for one in near))
        foreign = any(path not in TABLE for one in near for path in tree.headers[one].included(False))
        hidden = {"iosfwd"} if any("<<" in line for line in header.lines) else set()  # it declares streams but none of their operations
        includes = {number: included(path) if own else {of_cpp(path)} for number, path, own, kind in header.includes if kind in plain}
        have, said = set(), set()
        for number, line in enumerate(header.lines):
            have |= includes.get(number, set())
            if not line or re.match(r"\s*#\s*(include|pragma)\b", line):
                continue
            for use, homes in uses(line, theirs, ours):
                if use in said or (have - hidden) & set(homes) or (foreign and use.startswith("::")):
                    continue
                said.add(use)
                what = (f"{use} needs #include <{next(home for home in homes if home not in hidden)}>" if homes else
                        f"{use} is in no row of tests/headers/standard.py: add it there, or write it as std::NAME")
                found.append(f"{name}:{number + 1}: {what}")
    return found
