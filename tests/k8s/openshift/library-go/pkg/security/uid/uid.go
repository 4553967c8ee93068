// Package uid has the ranges of user IDs in a namespace's annotations. It stands in for
// github.com/openshift/library-go/pkg/security/uid, the one package of that module that the admission
// code needs: the module itself is not to be had from a Go proxy.
package uid

import "fmt"

// Block is a range of IDs, both ends included.
type Block struct{ Start, End uint32 }

// ParseBlock reads "START/SIZE" or "START-END".
func ParseBlock(text string) (Block, error) {
	var start, second uint32
	if _, err := fmt.Sscanf(text, "%d/%d", &start, &second); err == nil {
		return Block{start, start + second - 1}, nil
	}
	if _, err := fmt.Sscanf(text, "%d-%d", &start, &second); err == nil {
		return Block{start, second}, nil
	}
	return Block{}, fmt.Errorf("%q is neither START/SIZE nor START-END", text)
}
