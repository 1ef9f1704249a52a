// The flat program that a GraphRunner executes, and its translation from Python.
//
// In:  a list of instruction tuples made by coexec.runners.native.encode.
// Out: a Program, immutable once built, that any number of iterations run.
#pragma once

#include "library.h"
#include "sizes.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <pybind11/pybind11.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace coexec {

// The value of a symbol in sizes; waits for it.
using Symbols = std::function<std::optional<int64_t>(int64_t)>;

// One argument of an operation: a constant, a register, a size that varies, or a list of such.
struct Argument {
  enum class Kind { Constant, Register, Varying, List } kind = Kind::Constant;
  c10::IValue constant;
  int64_t reg = -1;
  Size size;                       // Varying only
  bool wants_tensor = false;       // Register, Varying: a number becomes a tensor, as in eager calls
  c10::TypePtr element;            // List only
  std::vector<Argument> elements;  // List only

  c10::IValue resolve(const std::vector<c10::IValue>& registers, const Symbols& symbols) const;
  bool reads(const std::function<bool(int64_t)>& matches) const;  // whether one of the registers that it reads does
};

enum class Opcode { Call, Feed, Fetch, Move, Switch, Jump, Compiled, Commit };

// When a call runs: at once, or after the iteration has been validated (in two rounds).
enum class When { Now, Commit, CommitLast };

// What a compiled block takes for granted of a tensor.
struct Given {
  std::vector<Size> shape;
  std::optional<std::vector<int64_t>> strides;  // unless they vary
  int64_t dtype;                                // a scalar type
};

struct Instruction {
  Opcode opcode;
  When when = When::Now;                 // Call, Feed, Compiled
  std::optional<c10::OperatorHandle> op; // Call
  std::vector<Argument> arguments;       // Call
  bool grad_mode = false;                // Call: some kernels look at it
  std::vector<std::optional<std::vector<Size>>> shapes;  // Call: what results have to have
  std::vector<int64_t> outs;             // Call, Feed, Move, Compiled: registers, -1 = dropped
  std::vector<int64_t> ins;              // Fetch, Move, Compiled
  std::vector<int64_t> symbols;          // Compiled: in sizes
  std::vector<int64_t> written;          // Compiled: registers whose memory it writes
  std::vector<std::optional<std::vector<int64_t>>> strides;  // Compiled: what results have to have
  std::vector<int64_t> dtypes;           // Compiled: scalar types of its results, -1 = not checked
  std::vector<Given> given;              // Compiled: what it was made for, of each of `ins`
  int64_t slot = 0;                      // Fetch
  bool copy = false;                     // Fetch: the memory is written later on
  bool draws = false;                    // Call, Compiled: random numbers
  bool bernoulli = false;                // Call: `bernoulli_(p)` of the default generator
  std::vector<int64_t> targets;          // Switch, Jump: instruction indices
  std::shared_ptr<Library> library;      // Compiled
  std::vector<int64_t> release;          // registers that nobody reads afterwards
  std::string where;                     // the user's line, for error messages
};

struct Program {
  int64_t register_count = 0;
  int64_t fetch_slots = 0;
  int64_t symbols = 0;            // in sizes that vary
  int64_t threads = 0;            // that kernels run on; 0: as many as Python's
  bool helped = false;            // whether large kernels are shared with a helper
  std::vector<int64_t> captured;  // registers bound when an iteration begins
  std::vector<Instruction> instructions;
  bool branches = false;          // whether paths differ in what they execute
  size_t draws_until = 0;         // before this instruction, and nowhere later, random numbers are drawn
};

Instruction parse_instruction(const pybind11::dict& encoded);

// Runs a `Call` on registers; its tensor results, flattened.
std::vector<c10::IValue> invoke(
    const Instruction& call, const std::vector<c10::IValue>& registers, const Symbols& symbols);

std::shared_ptr<Program> make_program(
    int64_t register_count,
    std::vector<int64_t> captured,
    int64_t fetch_slots,
    int64_t symbols,
    int64_t threads,
    bool helped,
    const pybind11::list& instructions);

}  // namespace coexec
