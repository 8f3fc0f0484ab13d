{{/* A release may serve several targets. Each has a gateway, verifiers and drafters of its own, so objects of services
are rendered once for each target, from values that are those of the release with the changes of the target. */}}

{{/* (dict "root" $ "template" "name"): renders a template for each target. It takes what is like $, and has "target", the
target's name, which is empty for the one that the values themselves describe. */}}
{{- define "draftwire.eachTarget" -}}
{{- $root := .root -}}
{{ include .template $root }}
{{- range $name, $changes := $root.Values.targets }}
{{- if kindIs "map" $changes }}
---
{{- $values := omit $root.Values "targets" | deepCopy }}
{{- include "draftwire.change" (dict "of" $values "by" $changes) }}
{{ include $.template (merge (dict "Values" $values "target" $name) (pick $root "Release" "Chart" "Files" "Capabilities")) }}
{{- end }}
{{- end }}
{{- end }}

{{/* (dict "of" map "by" map): changes a map in place. Maps are merged, everything else is replaced, null removes. */}}
{{- define "draftwire.change" -}}
{{- $of := .of -}}
{{- range $name, $value := .by -}}
{{- if kindIs "invalid" $value -}}
{{- $_ := unset $of $name -}}
{{- else if and (kindIs "map" $value) (kindIs "map" (get $of $name)) -}}
{{- include "draftwire.change" (dict "of" (get $of $name) "by" $value) -}}
{{- else -}}
{{- $_ := set $of $name $value -}}
{{- end -}}
{{- end -}}
{{- end }}
