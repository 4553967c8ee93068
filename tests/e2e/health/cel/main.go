// Evaluates a CEL expression over an object as JSON on standard input, as NVSentinel's
// kubernetes-object-monitor does: the object is the variable `resource`.
package main

import (
	"encoding/json"
	"fmt"
	"log"
	"os"

	"github.com/google/cel-go/cel"
)

func main() {
	var resource map[string]any
	if err := json.NewDecoder(os.Stdin).Decode(&resource); err != nil {
		log.Fatal(err)
	}
	env, err := cel.NewEnv(cel.Variable("resource", cel.DynType))
	if err != nil {
		log.Fatal(err)
	}
	ast, issues := env.Compile(os.Args[1])
	if issues.Err() != nil {
		log.Fatal(issues.Err())
	}
	program, err := env.Program(ast)
	if err != nil {
		log.Fatal(err)
	}
	value, _, err := program.Eval(map[string]any{"resource": resource})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(value.Value())
}
